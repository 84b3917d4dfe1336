"""Request whose progress is kept in a row: reading it updates the request, writing it takes the request out."""

from typing import Any, Protocol

from vllm.v1.request import Request


class Rows(Protocol):
    """Keeper of the progress of requests in rows."""

    def bring_up_to_date(self, request: Request) -> None:
        """Writes the row's progress into the request, which stays in its row."""

    def release(self, request: Request) -> None:
        """Writes the row's progress into the request, which leaves its row and is a plain ``Request`` again."""


class GuardedAttribute:
    """Attribute whose latest value is in the row.

    Reading it updates the request first. Writing it takes the request out of its row.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, request: Any, owner: type) -> Any:
        if request is None:
            return self
        request.decode_rows.bring_up_to_date(request)
        return self._read(request)

    def _read(self, request: Any) -> Any:
        if self._name not in request.__dict__:
            raise AttributeError(self._name)  # Not every release of vLLM has it.
        return request.__dict__[self._name]

    def __set__(self, request: Any, value: Any) -> None:
        request.decode_rows.release(request)
        setattr(request, self._name, value)


class WriteGuardedAttribute(GuardedAttribute):
    """Attribute that is always up to date in the request; writing it takes the request out of its row."""

    def __get__(self, request: Any, owner: type) -> Any:
        return self if request is None else self._read(request)


class RowRequest(Request):
    """A ``Request`` while it has a row. ``ScheduledRows`` gives vLLM's objects this class, and later their own back.

    The attributes below are all that changes while a request decodes. Code that reads one of them never gets an old
    value. Code that writes one of them, or the request's status, takes the request out of its row.

    A class, since vLLM reads requests at many places: progress that is kept beside them would have to be written into
    each one in every step. For 256 requests that takes a tenth of the step.
    """

    decode_rows: Rows

    num_computed_tokens = GuardedAttribute()  # type: ignore[assignment]
    num_output_placeholders = GuardedAttribute()  # type: ignore[assignment]
    num_in_flight_tokens = GuardedAttribute()
    last_sched_seq = GuardedAttribute()
    _output_token_ids = GuardedAttribute()  # type: ignore[assignment]
    _all_token_ids = GuardedAttribute()  # type: ignore[assignment]
    output_token_ids = GuardedAttribute()  # type: ignore[assignment]
    all_token_ids = GuardedAttribute()  # type: ignore[assignment]
    status = WriteGuardedAttribute()  # type: ignore[assignment]
    spec_token_ids = WriteGuardedAttribute()  # type: ignore[assignment]
    discard_latest_async_tokens = WriteGuardedAttribute()  # type: ignore[assignment]
    num_stale_output_tokens = WriteGuardedAttribute()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Takes the request out of its row, so that a copy is a plain request."""
        self.decode_rows.release(self)
        return self.__reduce_ex__(protocol)
