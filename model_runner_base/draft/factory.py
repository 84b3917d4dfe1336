"""Makes the drafter that ``speculative_config`` asks for."""

from model_runner_base.draft.chain import DraftModelDrafter
from model_runner_base.draft.device import DraftParts
from model_runner_base.draft.drafter import NO_DRAFTS, Drafter
from model_runner_base.draft.eagle import Eagle3Drafter, EagleDrafter, MedusaDrafter, MtpDrafter
from model_runner_base.draft.host import NgramDrafter, SuffixDrafter
from model_runner_base.draft.parallel import ParallelDraftModel, ParallelEagle3
from model_runner_base.step.request_states import RequestStates
from model_runner_base.vllm_compat.types.speculation import Speculation


def make_drafter(speculation: Speculation, requests: RequestStates, parts: DraftParts | None) -> Drafter:
    """Makes the drafter. ``parts`` are used by drafters on the device; None if no drafts are asked for."""
    if parts is None:
        return NO_DRAFTS
    if speculation.method == "ngram":
        return NgramDrafter(requests, *speculation.lookup, speculation.num_drafts)
    if speculation.suffix is not None:
        return SuffixDrafter(requests, speculation.suffix, speculation.num_drafts)
    is_parallel = speculation.mask_token is not None
    match speculation.method:
        case "draft_model":
            return (ParallelDraftModel if is_parallel else DraftModelDrafter)(parts)
        case "medusa":
            return MedusaDrafter(parts)
        case "eagle3" if is_parallel:
            return ParallelEagle3(requests, parts)
    heads = {"eagle": EagleDrafter, "eagle3": Eagle3Drafter, "mtp": MtpDrafter}
    return heads[speculation.method](requests, parts)
