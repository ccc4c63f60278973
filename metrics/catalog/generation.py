"""Metrics of generation: calls of `generate` between training steps, as of the hybrid engine.

The time of generation is the phase `generate`, its peak of memory a phase of memory_phase_peak, and
its gathers of parameters are the collectives of this phase.
"""

from __future__ import annotations

from .spec import counter

GENERATE_CALLS = counter(
    "generate_calls_total",
    "Calls of generate that returned, counted with the next step; of the engine's module or of "
    "DeepSpeed's hybrid engine.",
    from_zero=True,
    usual="The same on all ranks. Absent in a run without the hybrid engine that does not "
    "generate.",
)
GENERATED_SEQUENCES = counter(
    "generated_sequences_total",
    "Sequences that this rank has generated, if the calls show them.",
    from_zero=True,
    usual="A steady rate: the prompts of a call times the sequences for each prompt.",
)
GENERATED_TOKENS = counter(
    "generated_tokens_total",
    "Tokens that this rank has generated, without prompts and padding. Calls whose tokens cannot "
    "be counted exactly are left out, such as those with stop strings.",
    from_zero=True,
    usual="A steady rate. Its quotient with phase_seconds_total of generate is the speed, its "
    "quotient with generated_sequences_total the mean length.",
)
GENERATE_COMM_EXPOSED_SECONDS = counter(
    "generate_comm_exposed_seconds_total",
    "Seconds of generation in which it could do nothing but wait for collectives; part of "
    "comm_exposed_seconds, but updated with each step.",
    from_zero=True,
    usual="0 below ZeRO 3. With ZeRO 3 most of the generation, because each token gathers all "
    "parameters: gather them once (`hybrid_engine.pin_parameters`), or train with ZeRO 2.",
)

METRICS = (
    GENERATE_CALLS,
    GENERATED_SEQUENCES,
    GENERATED_TOKENS,
    GENERATE_COMM_EXPOSED_SECONDS,
)
