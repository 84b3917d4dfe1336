"""BidirectionalSpans of a prompt's items: where a model's image tokens see each other both ways (Gemma 3)."""

from model_runner_base.caches.spans import SentSpans, SpanEnds
from model_runner_base.requests.states import RequestStates
from model_runner_base.step.batch import InputBatch


class ItemSpans(SentSpans):
    """A run of tokens that stand for rows of an encoder's output is a span; text between them is not."""

    def __init__(self, requests: RequestStates) -> None:
        self._requests = requests

    def of_chunks(self, batch: InputBatch) -> SpanEnds:
        """Raises RuntimeError for a span whose end is not in the step: its tokens would see a part of it."""
        decodes = batch.num_decodes
        ends = SpanEnds.none(int(batch.query_len[decodes:].sum()))
        token = 0
        for index, info in enumerate(self._requests.infos_of(batch.rows[decodes:]), decodes):
            begin, count = int(batch.num_computed[index]), int(batch.query_len[index])
            for place in (item.mm_position for item in info.items):
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
