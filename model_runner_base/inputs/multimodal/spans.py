"""Spans of a prompt's items, for models whose image tokens see each other in both directions (Gemma 3 and 4)."""

from model_runner_base.caches.spans import SentSpans, SpanEnds
from model_runner_base.step.batch import InputBatch
from model_runner_base.step.request_states import RequestStates

SEEN = ("image", "video")
"""Modalities whose tokens see each other, as in vLLM and transformers; those of a sound do not."""


class ItemSpans(SentSpans):
    """Bidirectional spans: each is a run of tokens with encoder outputs; text between such runs belongs to none."""

    def __init__(self, requests: RequestStates, in_windows: bool = False) -> None:
        self._requests = requests
        self.in_windows = in_windows

    def of_chunks(self, batch: InputBatch) -> SpanEnds:
        """Finds the spans of the step's chunks.

        Raises RuntimeError for a span whose end is not in the step, since its tokens would see only a part of it.
        """
        decodes = batch.num_decodes
        ends = SpanEnds.none(int(batch.query_len[decodes:].sum()))
        token = 0
        for index, info in enumerate(self._requests.infos_of(batch.rows[decodes:]), decodes):
            begin, count = int(batch.num_computed[index]), int(batch.query_len[index])
            for place in (item.mm_position for item in info.items if item.modality in SEEN):
                if place.offset + place.length <= begin or place.offset >= begin + count:
                    continue
                for first, last in place.extract_embeds_range():
                    if last < begin or first >= begin + count:
                        continue
                    if last >= begin + count:
                        raise RuntimeError(
                            f"tokens {begin} to {begin + count - 1} of request {batch.req_ids[index]} cut an image, "
                            "whose tokens see each other: leave out scheduler_cls"
                        )
                    seen = slice(token + max(first - begin, 0), token + last + 1 - begin)
                    ends.first[seen], ends.last[seen] = first, last
            token += count
        return ends
