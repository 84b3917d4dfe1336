"""Which drafter ``speculative_config`` asks for."""

from collections.abc import Callable

from model_runner_base.caches.group import CacheKind
from model_runner_base.caches.paged import PagedCaches
from model_runner_base.draft.device import DraftParts
from model_runner_base.draft.drafter import NO_DRAFTS, Drafter
from model_runner_base.draft.eagle import Eagle3Drafter, EagleDrafter, MtpDrafter
from model_runner_base.draft.medusa import MedusaDrafter
from model_runner_base.draft.model import DraftModelDrafter
from model_runner_base.draft.ngram import NgramDrafter
from model_runner_base.limits import UnsupportedConfigError
from model_runner_base.requests.states import RequestStates
from model_runner_base.vllm_port.speculation import Speculation


def make_drafter(
    speculation: Speculation,
    requests: RequestStates,
    caches: CacheKind,
    parts: Callable[[PagedCaches], DraftParts],
) -> Drafter:
    """``parts`` are made if the drafter runs on the device.

    Raises UnsupportedConfigError for caches that cannot be drafted with.
    """
    if not speculation.num_drafts:
        return NO_DRAFTS
    if not isinstance(caches, PagedCaches):
        raise UnsupportedConfigError(
            "speculative decoding is not supported yet with attention kernels that have metadata builders: leave out "
            "speculative_config"
        )
    if speculation.method == "ngram":
        return NgramDrafter(requests, *speculation.lookup, speculation.num_drafts)
    match speculation.method:
        case "draft_model":
            return DraftModelDrafter(parts(caches))
        case "medusa":
            return MedusaDrafter(parts(caches))
    heads = {"eagle": EagleDrafter, "eagle3": Eagle3Drafter, "mtp": MtpDrafter}
    return heads[speculation.method](requests, parts(caches))
