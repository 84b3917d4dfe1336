"""Components of a pooling head: the tokens that its pooler reads, and the token types of pairs of texts."""

from typing import Any, ClassVar

import numpy as np
from vllm.model_executor.models.bert import TOKEN_TYPE_SHIFT, BertEmbedding
from vllm.model_executor.models.roberta import RobertaEmbedding
from vllm.pooling_params import PoolingParams

from model_runner_base.errors import RequestError
from model_runner_base.heads.pooling.metadata import second_text_of
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.components import StepComponent
from model_runner_base.step.packing import Section, pad_into
from model_runner_base.step.request_states import RequestInfo
from model_runner_base.step.sizes import StepSize

POOLED_TOKENS = "pooled_tokens"


class PooledTokens(StepComponent):
    """Packs the index of each request's last token in the step, or of its first token (``is_first``).

    Example: "a" has 3 tokens of its prompt, "b" 2, after one row of padding: the last ones are 3 and 5.
    """

    prompts_in_chunks = True
    """True: a pooling model has tokens of prompts only, so a step has no decode rows, and only mixed sizes run."""

    def __init__(self, is_first: bool) -> None:
        self._is_first = is_first

    def sections(self, size: StepSize) -> list[Section]:
        return [Section(POOLED_TOKENS, (size.num_logits,))]

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        tokens = batch.query_start if self._is_first else batch.query_start + batch.query_len - 1
        pad_into(views[POOLED_TOKENS], tokens, 0)


SECOND_TEXT = 1 << TOKEN_TYPE_SHIFT
"""The bit of the ids of a second text's tokens."""


def has_token_types(model: Any) -> bool:
    """Whether a loaded model has embeddings for two types of tokens, and takes the types in a bit of the ids."""
    embeddings = (each for each in model.modules() if isinstance(each, BertEmbedding | RobertaEmbedding))
    return any(each.token_type_embeddings.num_embeddings > 1 for each in embeddings)


def check_token_types(params: PoolingParams, num_tokens: int, has_types: bool) -> None:
    """Raises RequestError if a prompt of ``num_tokens`` has a second text and the model knows no types.

    Front ends also name an empty one: a tokenizer may return types that are all 0.
    """
    start, stop = second_text_of(params, num_tokens) or (0, 0)
    if not has_types and start < stop:
        raise RequestError("this model has no token types: send both texts as one prompt")


class TokenTypes(StepComponent):
    """Sets the bit in the ids of second texts, after the ids were packed.

    A token's type is 0 in the first text and 1 in the second. BERT adds an embedding of it.

    vLLM's models take them in a bit of the token ids (``vllm/model_executor/models/bert.py``). Its front end sends
    where the second text lies.
    """

    reads: ClassVar[tuple[str, ...]] = ("token_ids",)

    def __init__(self, max_num_reqs: int) -> None:
        self._second_text = np.zeros((2, max_num_reqs), np.int64)
        """[2, rows] position of the second text's first token, and of the first token after it; equal if there is
        none."""

    def admit(self, row: int, info: RequestInfo, token_ids: list[int]) -> None:
        self._second_text[:, row] = second_text_of(info.params, len(token_ids)) or (0, 0)

    def fill(self, batch: InputBatch, size: StepSize, views: dict[str, np.ndarray]) -> None:
        token_ids, computed = views["token_ids"], batch.num_computed
        starts, stops = (self._second_text[:, batch.rows] - computed).clip(0, batch.query_len)
        for index in np.flatnonzero(starts < stops).tolist():
            first = batch.query_start[index]
            token_ids[first + starts[index] : first + stops[index]] |= SECOND_TEXT
