"""Finds the active trace of the user's own code, without importing opentelemetry."""

from __future__ import annotations

import sys
from collections.abc import Mapping

# Without this module in `sys.modules` there is no trace.
OPENTELEMETRY = "opentelemetry.trace"


def current_trace_labels() -> Mapping[str, str] | None:
    """Return the exemplar labels of the span that is active on this thread.

    Return None if no span is active or the span is not sampled, because its trace cannot be looked
    up. If the user's code has not imported opentelemetry, the call costs one dictionary lookup.
    """
    trace = sys.modules.get(OPENTELEMETRY)
    # While another thread is still importing the module, its functions may be missing.
    get_current_span = getattr(trace, "get_current_span", None)
    if get_current_span is None:
        return None
    context = get_current_span().get_span_context()
    if not (context.is_valid and context.trace_flags.sampled):
        return None
    return {"trace_id": f"{context.trace_id:032x}"}
