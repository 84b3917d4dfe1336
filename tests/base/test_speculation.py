"""The parts of speculation on their own: verification, own blocks, prompt lookup, what is shared, what is refused."""

import json
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BUNDLED_MODEL, engine
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from vllm import LLM
from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

from model_runner_base import DeviceOps
from model_runner_base.caches.paged import blocks_of_rows, fill_ring, ring_size
from model_runner_base.draft.host import NgramDrafter
from model_runner_base.errors import UnsupportedConfigError
from model_runner_base.heads.sampling.token_masks import TokenMasks
from model_runner_base.models.draft_loading import return_states_of_layers, share_embeddings, share_logits_head
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.call import DecodeRows
from model_runner_base.step.request_states import BlockTable, DeviceRows, RequestStates, commit
from model_runner_base.step.schedule import Grammar
from model_runner_base.testing.cases import random_prompts
from model_runner_base.testing.drafts import speculation
from model_runner_base.testing.engine import DEFAULTS, generate, greedy, metric, tokens_of
from model_runner_base.testing.models import TinyModel
from model_runner_base.vllm_compat.patches.configs import recognise_marked_heads

NUM_ROWS, PADDING = 6, 6
Request = tuple[int, list[tuple[int, int]], int]
"""Row; for each draft, the draft and what was sampled in its place; what was sampled after them."""


@st.composite
def verified_steps(draw: Any) -> tuple[int, list[Request]]:
    num_drafts = draw(st.integers(1, 4))
    rows = draw(st.lists(st.integers(0, NUM_ROWS - 1), unique=True, max_size=4))
    token = st.integers(0, 2)
    drafted = st.lists(st.tuples(token, token), max_size=num_drafts)
    return num_drafts, [(row, draw(drafted), draw(token)) for row in rows]


@settings(deadline=None)
@given(st.lists(verified_steps(), min_size=1, max_size=4))
def test_verification_keeps_what_follows_right_drafts(steps: list[tuple[int, list[Request]]]) -> None:
    """Steps verify rows of any number of drafts, with padding between them, as a loop does."""
    num_drafts = steps[0][0]
    device = DeviceRows(NUM_ROWS, DeviceOps(torch.device("cpu")), 1 + num_drafts)
    last = [0] * NUM_ROWS
    for start, (_, requests) in enumerate(steps):
        slots, tokens, want, want_rows = [], [], [], {}
        for row, drafted, behind in requests:
            drafted = drafted[:num_drafts]
            drafts, sampled = [d for d, _ in drafted] + [-1], [s for _, s in drafted] + [behind]
            num_right = next((i for i, (d, s) in enumerate(drafted) if d != s), len(drafted))
            for place, (draft, token) in enumerate(zip(drafts, sampled, strict=True)):
                slots.append((row, 100 * start + place, draft))
                tokens.append(token)
                want.append(token if place <= num_right else -1)
            want_rows[row] = sampled[: num_right + 1], 100 * start + num_right
            for _ in range(num_drafts - len(drafted)):
                slots.append((PADDING, 0, -1))
                tokens.append(1)
                want.append(-1)
        if not slots:
            continue
        got = commit(device.tensors, torch.tensor(slots, dtype=torch.int32).T, torch.tensor(tokens, dtype=torch.int32))
        assert got.tolist() == want
        for row, (yielded, position) in want_rows.items():
            assert device.tensors[0][row].tolist() == [yielded[-1]] + [-1] * num_drafts
            assert device.tensors[1][row] == position
            padded = yielded + [-1] * (num_drafts + 1 - len(yielded))
            assert device.yielded[row].tolist() == [*padded, last[row]]
            last[row] = yielded[-1]


@settings(deadline=None)
@given(
    block_size=st.sampled_from([1, 4, 16]),
    reach=st.integers(1, 12),
    bounds=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    data=st.data(),
)
def test_own_blocks_are_the_tables_wherever_a_row_turns_out_to_be(
    block_size: int, reach: int, bounds: list[int], data: st.DataObject
) -> None:
    table = BlockTable(len(bounds), 80, block_size, 1)
    rows, first = np.arange(len(bounds))[::-1].copy(), np.array(bounds)
    for row in range(len(bounds)):
        count = data.draw(st.integers(1, 80 // block_size))
        table.assign(row, data.draw(st.permutations(range(100, 100 + count))))
    ring = np.full((len(bounds) + 1, ring_size(reach, block_size)), 7, np.int32)
    fill_ring(block_size, first, first + reach, rows, table.table, table.num_blocks, ring)
    assert not ring[-1].any(), "padding goes to the null block"
    for offset in range(reach):
        positions = torch.from_numpy(np.append(first + offset, 0)).view(-1, 1)
        own = blocks_of_rows(DecodeRows(positions), torch.from_numpy(ring), block_size)
        for index, row in enumerate(rows.tolist()):
            block = int(positions[index]) // block_size
            assert own[index] == (table.table[row, block] if block < table.num_blocks[row] else 0)


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    lengths=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
    num_drafts=st.integers(1, 5),
)
def test_prompt_lookup_is_vllms(tokens: list[int], lengths: list[int], num_drafts: int) -> None:
    requests = RequestStates(2, 64)
    requests.token_ids[1, : len(tokens)] = tokens
    drafter = NgramDrafter(requests, *lengths, num_drafts)
    (got,) = drafter.look_up(["a"], np.array([1]), np.array([len(tokens)]), np.array([1]))
    want = _find_longest_matched_ngram_and_propose_tokens(np.array(tokens, np.int32), *lengths, 1000, num_drafts)
    assert got == want.tolist()


def test_logits_rows_of_a_batch() -> None:
    """Logits rows are right where three requests decode, with 3, 0 and 1 drafts, and two have chunks."""
    batch: Any = SimpleNamespace(decode_query_len=4, num_decodes=3, query_len=np.array([4, 1, 2, 17, 5]))
    start, count = InputBatch.logits_start, InputBatch.num_logits
    batch.logits_start, batch.num_logits = (lambda r: start(batch, r)), (lambda r: count(batch, r))
    every = InputBatch.logits_rows(batch, np.array([0, 2, 3, 4]))
    assert every.indices.tolist() == [0, 1, 2, 3, 8, 9, 12, 13]
    assert every.owner.tolist() == [0, 0, 0, 0, 1, 1, 2, 3]
    assert every.place.tolist() == [0, 1, 2, 3, 0, 1, 0, 0]


@pytest.mark.parametrize("free", [[], [2], [2, 3], [1, 2, 3]])
def test_no_draft_is_right_before_a_place_that_a_grammar_leaves_free(free: list[int]) -> None:
    """The scheduler knows no drafts that are on the device alone, and masks nothing while a request reasons: without
    drafts it would have masked the next step."""
    masks = TokenMasks(40, lambda function, state: function, DeviceOps(torch.device("cpu")))
    ids = {"grammar": 0, "plain": 1, "chunk": 2}
    batch: Any = InputBatch(
        req_ids=list(ids),
        num_tokens=17,
        rows=np.arange(3),
        query_len=np.array([4, 4, 9]),
        query_start=np.array([0, 4, 8]),
        num_computed=np.array([50, 60, 0]),
        seq_lens=np.array([54, 64, 9]),
        is_sampled=np.ones(3, np.bool_),
        num_sampled=3,
        num_decodes=2,
        decode_query_len=4,
    )
    slots = torch.stack((torch.arange(9), torch.arange(9), torch.tensor([7, 8, 9, -1, 4, 5, 6, -1, -1]))).int()
    bitmask = np.full((5, 2), 3, np.int32)
    bitmask[free] = -1
    inputs: Any = SimpleNamespace(batch=batch, sample_slots=slots)
    logits, got = masks.apply_grammar(inputs, torch.zeros(9, 40), Grammar(["grammar", "chunk"], bitmask))
    want = [-1 if place + 1 in free else draft for place, draft in enumerate([7, 8, 9, -1])]
    assert got[2].tolist() == [*want, 4, 5, 6, -1, -1] and got[:2].equal(slots[:2])
    num_allowed = logits.isfinite().sum(dim=1).tolist()
    assert num_allowed == [40 if row in free else 4 for row in range(4)] + [40] * 4 + [4]


def test_a_head_shares_what_its_checkpoint_leaves_out() -> None:
    embed, head, own = object(), object(), object()
    target: Any = SimpleNamespace(model=SimpleNamespace(embed_tokens=embed), lm_head=head)
    draft: Any = SimpleNamespace(model=SimpleNamespace(embed_tokens=None), has_own_embed_tokens=False)
    share_embeddings(draft, target)
    share_logits_head(draft, target)
    assert draft.model.embed_tokens is embed and draft.lm_head is head
    draft = SimpleNamespace(
        model=SimpleNamespace(embed_tokens=own), lm_head=own, has_own_embed_tokens=True, has_own_lm_head=True
    )
    share_embeddings(draft, target)
    share_logits_head(draft, target)
    assert draft.model.embed_tokens is draft.lm_head is own
    with pytest.raises(UnsupportedConfigError, match="use a draft checkpoint with embed_tokens"):
        share_embeddings(SimpleNamespace(model=SimpleNamespace()), SimpleNamespace(model=SimpleNamespace()))


@pytest.mark.parametrize("layers", [[2, 2, 2], [0, 1, 2], [1, 2], [1, 3, 5]])
def test_states_that_eagle_3_cannot_read_are_refused(layers: list[int]) -> None:
    target: Any = SimpleNamespace(supports_eagle3=True, config=SimpleNamespace(num_hidden_layers=5))
    with pytest.raises(UnsupportedConfigError, match="set eagle_aux_hidden_state_layer_ids"):
        return_states_of_layers(target, SimpleNamespace(eagle_aux_hidden_state_layer_ids=layers))
    with pytest.raises(UnsupportedConfigError, match="returns no states of its layers"):
        return_states_of_layers(SimpleNamespace(), SimpleNamespace())


def test_a_marked_head_is_eagle_without_a_word(tmp_path: Path) -> None:
    class EngineArgs:
        def __init__(self, config: Any) -> None:
            self.speculative_config = config

        def create_speculative_config(self) -> Any:
            return self.speculative_config

    recognise_marked_heads(EngineArgs)
    recognise_marked_heads(EngineArgs)
    (tmp_path / "config.json").write_text(json.dumps({"is_eagle": True}))
    marked = {"model": str(tmp_path), "num_speculative_tokens": 2}
    assert EngineArgs(marked).create_speculative_config() == marked | {"method": "eagle"}
    three_layers = {"is_eagle": True, "architectures": ["LlamaForCausalLMEagle3"]}
    (tmp_path / "config.json").write_text(json.dumps(three_layers))
    assert EngineArgs(marked).create_speculative_config() == marked | {"method": "eagle3"}
    for config in (
        None,
        marked | {"method": "draft_model"},
        marked | {"model": str(BUNDLED_MODEL)},
        {"model": "ngram"},
    ):
        assert EngineArgs(config).create_speculative_config() == config


def test_windows_are_refused_under_a_scheduler_that_forgets_them(tiny_model: Any) -> None:
    """Windows are refused, since vLLM's own asynchronous scheduler gives up blocks before a window that wrong drafts
    still need."""
    model = tiny_model("mistral-window")
    options = DEFAULTS | {"enforce_eager": True, "speculative_config": speculation("same", model)}
    own = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
    with pytest.raises(UnsupportedConfigError, match="leave out scheduler_cls"):
        LLM(str(model.path), async_scheduling=True, scheduler_cls=own, **options)


def test_a_draft_of_an_unknown_quantisation_is_refused(tiny_model: Any) -> None:
    """A draft that can neither run quantised nor be dequantised is refused before its weights are read."""
    model = tiny_model("llama")
    config = speculation("same", model)
    path = Path(config["model"])
    quantised = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "marlin-24"}
    whole = (path / "config.json").read_text()
    (path / "config.json").write_text(json.dumps(json.loads(whole) | {"quantization_config": quantised}))
    try:
        with pytest.raises(Exception, match="compressed-tensors checkpoints with format marlin-24 are not dequantised"):
            LLM(str(model.path), **(DEFAULTS | {"enforce_eager": True, "speculative_config": config}))
    finally:
        (path / "config.json").write_text(whole)


def multi_token_prediction(model: TinyModel, path: Path) -> None:
    """A MiMo checkpoint: the model, and a further layer that drafts."""
    weights, config = load_file(model.path / "model.safetensors"), json.loads((model.path / "config.json").read_text())
    layer, size = f"model.layers.{config['num_hidden_layers'] - 1}.", config["hidden_size"]
    prefix, half = "model.mtp_layers.0.", 0.5 * torch.eye(config["hidden_size"])
    own = {prefix + name.removeprefix(layer): w.clone() for name, w in weights.items() if name.startswith(layer)}
    norms = {prefix + name: torch.ones(size) for name in ("token_layernorm.weight", "hidden_layernorm.weight")}
    own |= norms | {prefix + "input_proj.weight": torch.cat((half, half), dim=1)}
    own |= {prefix + "final_layernorm.weight": weights["model.norm.weight"].clone()}
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).clone()
    path.mkdir()
    save_file(weights | own | {"lm_head.weight": head}, path / "model.safetensors", {"format": "pt"})
    mimo = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1, "tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps(config | mimo))


@pytest.fixture(scope="module")
def accepted() -> list[float]:
    """Number of drafts that each run has accepted."""
    return []


@pytest.mark.in_turns
@pytest.mark.parametrize("is_eager", [True, False])
def test_multi_token_prediction(is_eager: bool, tiny_model: Any, tmp_path: Path, accepted: list[float]) -> None:
    """A compiled layer masks other positions than those it was traced with, and drafts as the eager one does."""
    model = tiny_model("qwen2")
    multi_token_prediction(model, tmp_path / "mimo")
    config = {"method": "mtp", "num_speculative_tokens": 2}
    options = {"additional_config": {"neuron_config": {"max_padding": 1}}}
    with engine(tmp_path / "mimo", enforce_eager=is_eager, speculative_config=config, **options) as llm:
        check_tokens(llm, model)
        num_accepted = metric(llm, "vllm:spec_decode_num_accepted_tokens")
    accepted.append(num_accepted)
    assert num_accepted == accepted[0], "compiled, the layer drafts otherwise"


@pytest.mark.parametrize("kind", ["sequential", "parallel", "speculators"])
def test_states_of_three_layers(kind: str, tmp_path: Path) -> None:
    """EAGLE-3 reads three layers of its target. It drafts tokens one after another, or all in one pass with masks
    after the tokens; or its checkpoint is given as the model, as the library `speculators` writes it."""
    model = TinyModel(tmp_path / "kjv")
    copytree(BUNDLED_MODEL, model.path)
    config = speculation("head-over-layers", model)
    options: dict[str, Any] = {"dtype": "float32", "enforce_eager": True}
    if kind == "parallel":
        config["parallel_drafting"] = True
        add_masks(Path(config["model"]))
    if kind == "speculators":
        name_verifier(Path(config["model"]), model.path)
        started = engine(config["model"], **options)
    else:
        started = engine(model.path, speculative_config=config, **options)
    with started as llm:
        check_tokens(llm, model)
        assert metric(llm, "vllm:spec_decode_num_drafts") > 0


def add_masks(draft: Path) -> None:
    config, weights = json.loads((draft / "config.json").read_text()), load_file(draft / "model.safetensors")
    (draft / "config.json").write_text(json.dumps(config | {"ptd_token_id": 7}))
    weights["mask_hidden"] = torch.zeros(1, 3 * config["hidden_size"])
    save_file(weights, draft / "model.safetensors", {"format": "pt"})


def name_verifier(draft: Path, verifier: Path) -> None:
    """Writes the config in the form of `speculators`."""
    layer = json.loads((draft / "config.json").read_text())
    names = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    ours = {name: layer.pop(name) for name in names}
    verified = {"name_or_path": str(verifier), "architectures": ["LlamaForCausalLM"]}
    config = {
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": verified,
        },
        "transformer_layer_config": layer,
        "norm_before_residual": False,
    }
    (draft / "config.json").write_text(json.dumps(config | ours))


def test_further_heads(tiny_model: Any) -> None:
    """Medusa's heads, each of which guesses a token further ahead, draft for the model's own tokens."""
    model = tiny_model("llama")
    with engine(model.path, enforce_eager=True, speculative_config=speculation("further-heads", model)) as llm:
        check_tokens(llm, model)
        assert metric(llm, "vllm:spec_decode_num_drafts") > 0


def check_tokens(llm: LLM, model: TinyModel) -> None:
    prompts = random_prompts(90, [3, 40, 90, 130])
    for prompt, tokens in zip(prompts, tokens_of(generate(llm, prompts, greedy(30))), strict=True):
        assert tokens == model.greedy(prompt, 30)
