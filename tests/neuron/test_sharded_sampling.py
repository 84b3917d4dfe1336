"""Drawing from a vocabulary that ranks share: the tokens are those that the sampler draws from whole rows."""

from collections.abc import Callable
from functools import partial
from threading import Barrier, Thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch_xla
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from vllm import SamplingParams
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config

from model_runner_base.device_ops import DeviceOps
from model_runner_base.heads.sampling.sampler import WHOLE, CutVocabulary, SamplingMode, SamplingStates, sample
from model_runner_base.step.graph_policy import SortLimits
from neuron_runner.compilation import CompiledFunction
from neuron_runner.ops import logits as logits_ops
from neuron_runner.ops.logits import NeuronLogitsProcessor, cut_vocabulary

CAPPED = SortLimits(max_candidates=5, max_width=16)


class Ranks:
    """Ranks as threads: each waits for the others when it hands numbers over."""

    def __init__(self, num_ranks: int, width: int, size: int) -> None:
        self._barrier = Barrier(num_ranks, timeout=10)
        self._handed: list[torch.Tensor | None] = [None] * num_ranks
        self.num_gathered = 0
        """Numbers a row that a rank hands over."""
        self.vocabularies = [
            CutVocabulary(rank * width, width, num_ranks, size, partial(self._all_gather, rank))
            for rank in range(num_ranks)
        ]

    def _all_gather(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        self.num_gathered += x.shape[1] * (rank == 0)
        self._handed[rank] = x
        self._barrier.wait()
        everything = torch.cat([part for part in self._handed if part is not None], dim=-1)
        self._barrier.wait()
        return everything

    def each(self, function: Callable[[int, CutVocabulary], torch.Tensor]) -> list[torch.Tensor]:
        results: dict[int, torch.Tensor] = {}

        def run(rank: int) -> None:
            try:
                results[rank] = function(rank, self.vocabularies[rank])
            except BaseException:
                self._barrier.abort()
                raise

        threads = [Thread(target=run, args=(rank,)) for rank in range(len(self.vocabularies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[rank] for rank in range(len(threads))]


REQUESTS = st.one_of(
    st.just({"temperature": 0.0}),
    st.fixed_dictionaries({"temperature": st.sampled_from([0.3, 1.0, 5.0])}),
    st.fixed_dictionaries({"min_p": st.sampled_from([0.01, 0.3, 1.0])}),
)
SORTED_REQUESTS = REQUESTS | st.fixed_dictionaries(
    {"top_k": st.integers(1, 8), "top_p": st.sampled_from([0.3, 0.9, 1.0]), "min_p": st.sampled_from([0.0, 0.1])}
)


@given(st.data())
@settings(max_examples=examples(300), deadline=None)
def test_ranks_draw_what_one_draws_from_whole_rows(data: st.DataObject) -> None:
    """Ranks draw the same for any mixture of requests, with vocabularies that end raggedly, ranks of nothing but
    padding, ties, and forbidden tokens."""
    num_ranks, width = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 40))
    size = data.draw(st.integers(1, num_ranks * width))
    limits = data.draw(st.sampled_from([SortLimits(), CAPPED]))
    requests = data.draw(st.lists(SORTED_REQUESTS if limits is CAPPED else REQUESTS, min_size=1, max_size=4))
    count = len(requests)
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    numbers = (rng.normal(size=(count, size)) * 2).round(data.draw(st.integers(0, 3)))
    numbers[rng.random((count, size)) < 0.1] = -np.inf
    numbers[:, rng.integers(size)] = 1.0  # No row is forbidden altogether.
    logits = torch.from_numpy(numbers.astype(np.float32))

    states = SamplingStates(count, size, 0, DeviceOps(torch.device("cpu")))
    for row, request in enumerate(requests):
        states.admit(row, SamplingParams(**request), int(rng.integers(1 << 63)))
    mode = SamplingMode(states.modes.max())
    slots = torch.tensor([list(range(count)), data.draw(st.permutations(range(count)))], dtype=torch.int32)

    def rows() -> tuple[torch.Tensor, torch.Tensor]:
        """The tensors of ``DeviceRows``."""
        return torch.full((count + 1, 1), -1, dtype=torch.int32), torch.full((count + 1,), -1, dtype=torch.int32)

    expected = sample(mode, False, limits, logits, slots, *states.tables(), *rows())
    ranks = Ranks(num_ranks, width, size)
    padded = torch.nn.functional.pad(logits, (0, num_ranks * width - size), value=100.0)

    def draw(rank: int, vocabulary: CutVocabulary) -> torch.Tensor:
        assert mode in vocabulary.modes(limits)
        own = vocabulary.own(padded[:, vocabulary.start :][:, :width])
        assert vocabulary.whole(own).equal(logits)
        last, computed = rows()
        tokens = sample(mode, False, limits, own, slots, *states.tables(), last, computed, vocabulary=vocabulary)
        assert isinstance(tokens, torch.Tensor) and last[:, 0].tolist() == [*tokens.tolist(), -1]
        assert computed.tolist() == [*slots[1].tolist(), -1]
        return tokens

    for tokens in ranks.each(draw):
        assert tokens.dtype == torch.int32
        assert tokens.tolist() == expected.tolist()  # type: ignore[union-attr]
    greedy = [row for row, request in enumerate(requests) if request.get("temperature") == 0]
    assert [tokens[row].item() for row in greedy] == logits.numpy().argmax(-1)[greedy].tolist()


@pytest.mark.parametrize(
    ("limits", "modes"),
    [(SortLimits(), [SamplingMode.GREEDY, SamplingMode.RANDOM]), (CAPPED, list(SamplingMode))],
    ids=str,
)
def test_little_is_handed_over(limits: SortLimits, modes: list[SamplingMode]) -> None:
    """Ranks hand over, of a vocabulary of 1000, a token in three numbers, the maximum for min-p, and the candidates
    where capped."""
    ranks = Ranks(2, 500, 1000)
    assert list(ranks.vocabularies[0].modes(limits)) == modes
    logits, slots = torch.randn(1, 1000), torch.zeros(2, 1, dtype=torch.int32)
    tables = torch.ones(1, 3), torch.ones(1, 3, dtype=torch.int32)
    recorded = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for mode in modes:
        ranks.num_gathered = 0
        ranks.each(
            lambda rank, vocabulary, mode=mode: sample(
                mode, False, limits, logits[:, :500], slots, *tables, *recorded, vocabulary=vocabulary
            )
        )
        candidates = limits.max_candidates or 0
        assert ranks.num_gathered == (3 if mode == SamplingMode.GREEDY else 3 + 1 + candidates)


def test_tokens_above_two_to_the_24_are_exact() -> None:
    """Tokens are exact, compiled on the device that steps run on; the other rank's logits are lower."""
    width, token = (1 << 23) + 20, (1 << 24) + 33
    device = torch_xla.device()
    vocabulary = CutVocabulary(width, width, 2, 2 * width, lambda x: torch.cat((torch.full_like(x, -9.0), x), dim=-1))
    own = torch.zeros(1, width)
    own[0, token - width] = 50.0
    floats = torch.tensor([[0.01, 1.0, 0.5], [0.0, 1.0, 0.0]]).to(device)
    ints = torch.tensor([[2 * width, 1, 2]] * 2, dtype=torch.int32).to(device)
    slots = torch.zeros(2, 1, dtype=torch.int32).to(device)
    for mode in (SamplingMode.GREEDY, SamplingMode.RANDOM):
        last = [torch.zeros(*shape, dtype=torch.int32).to(device) for shape in ((2, 1), (2,))]
        sampler = CompiledFunction(partial(sample, mode, False, SortLimits(), vocabulary=vocabulary), last)
        assert sampler(own.to(device), slots, floats, ints, *last).tolist() == [token]
        assert last[0].tolist() == [[token], [0]]


class Head(nn.Linear):
    """A rank's rows of a vocabulary head."""

    embedding_dim = 4
    quant_method = SimpleNamespace(apply=lambda layer, x, bias: layer(x))


class Model(nn.Module):
    """A vocabulary of 13, of which each of two ranks has eight, the last three padding."""

    def __init__(self, after: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.head = Head(4, 8, bias=False)
        self.processor = NeuronLogitsProcessor(13)
        self.after = after

        self.draft_model: nn.Module | None = None

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.after(self.processor(self.head, hidden_states))


@pytest.mark.parametrize("has_draft", [False, True])
@pytest.mark.parametrize(
    ("after", "is_cut"),
    [
        (lambda logits: logits, True),
        (lambda logits: torch.tanh(logits) * 3, True),
        (lambda logits: logits.log_softmax(-1), False),
        (lambda logits: logits.index_fill(-1, torch.tensor([2]), -9.0), False),
        (lambda logits: logits.index_fill(-1, torch.tensor([12]), -9.0), False),
        (lambda logits: logits + torch.arange(13.0), False),
    ],
    ids=["plain", "capped", "normalised", "a token of every part", "a token of one part", "biased"],
)
def test_models_that_need_whole_rows_keep_them(
    after: Callable[[torch.Tensor], torch.Tensor], is_cut: bool, has_draft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that needs whole rows keeps them, here as rank 1 of 2 with the same weights. A model that drafts for
    it has a head of its own, and gathers."""

    def gather(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x), dim=-1)

    monkeypatch.setattr(NeuronLogitsProcessor, "_gather_logits", lambda self, logits: gather(logits))
    monkeypatch.setattr(logits_ops, "tensor_model_parallel_all_gather", gather)
    monkeypatch.setattr(logits_ops, "get_tp_group", lambda: SimpleNamespace(world_size=2, rank_in_group=1))
    monkeypatch.setattr(logits_ops, "VocabParallelEmbedding", Head)
    compilation = CompilationConfig(mode=CompilationMode.NONE, custom_ops=["all"])
    with set_current_vllm_config(VllmConfig(compilation_config=compilation)), torch.no_grad():
        model = Model(after)
        model.draft_model = Model(lambda logits: logits) if has_draft else None
        before = model.compute_logits(torch.ones(2, 4))
        vocabulary = cut_vocabulary(model)
        if not is_cut:
            assert vocabulary is WHOLE and model.compute_logits(torch.ones(2, 4)).equal(before)
            return
        assert isinstance(vocabulary, CutVocabulary)
        assert (vocabulary.start, vocabulary.width, vocabulary.size) == (8, 8, 13)
        own = vocabulary.own(model.compute_logits(torch.ones(2, 4)))
        assert own[:, :5].equal(before[:, 8:]) and own[:, 5:].isneginf().all()
        assert not has_draft or model.draft_model.processor.gathers
