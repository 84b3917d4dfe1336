"""Deliberate faults in formats of caches: latents, values of a head size of their own, and numbers of 8 bits."""

from mutation import Mutation

MUTATIONS = [
    Mutation(
        "a latent is written to the next slot",
        "attention/cache_format.py",
        "kv_cache.index_put_((blocks, offsets), ",
        "kv_cache.index_put_((blocks, (offsets + 1) % kv_cache.shape[1]), ",
        "test_cache_formats and one_request",
    ),
    Mutation(
        "rotary keys are left out of the scores of latents",
        "models/layers/latent_attention.py",
        "torch.cat((self.projection.to_latents(nope), rotary), dim=2)",
        "torch.cat((self.projection.to_latents(nope), 0 * rotary), dim=2)",
        "test_cache_formats and one_request",
    ),
    Mutation(
        "scores of latents are scaled by the width of a row, not of a head",
        "attention/latent.py",
        "        super().__init__(*args, **kwargs)",
        "        super().__init__(*args, **kwargs)\n        self.scale = self.head_size**-0.5",
        "test_cache_formats and one_request",
    ),
    Mutation(
        "queries are taken to the space of latents by the next head's projection",
        "models/layers/latent_attention.py",
        "self._layer.to_latent)",
        "self._layer.to_latent.roll(1, 0))",
        "test_cache_formats and one_request",
    ),
    Mutation(
        "values of unequal heads are read where keys begin",
        "attention/unequal_heads.py",
        "cache[..., self.head_size :].index_select",
        "cache[..., : self.value_size].index_select",
        "test_unequal_heads",
        is_later=True,
    ),
    Mutation(
        "outputs are not multiplied by the scale of 8-bit values",
        "models/layers/cache_scales.py",
        "out = (out * layer.cache_value_scale).to(",
        "out = out.to(",
        "test_cache_formats and eight_bits",
    ),
    Mutation(
        "numbers too large for 8 bits are not limited",
        "attention/cache_format.py",
        ".clamp(-limit, limit)",
        "",
        "test_cache_formats and eight_bits",
    ),
    Mutation(
        "scales of 8-bit caches are looked for under the model's own names alone",
        "models/layers/cache_scales.py",
        "each := known.get(name) or self._layers.get(name)",
        "each := self._layers.get(name)",
        "test_cache_formats and scales_by_family",
    ),
    Mutation(
        "logits stay in the model's dtype",
        "heads/generate.py",
        "self.model.compute_logits(hidden_states[indices]).float())",
        "self.model.compute_logits(hidden_states[indices]))",
        "test_half_precision",
    ),
]
