"""Tests of patches: what was wrapped is restored to the very same object."""

from __future__ import annotations

import gc
import weakref

from zerowatch.runtime.common.patching import AttributePatch


class Engine:
    def step(self) -> str:
        return "stepped"


def doubled(original):
    return lambda: original() * 2


def test_a_wrapped_method_of_an_instance_leaves_no_trace() -> None:
    engine = Engine()

    wrap = AttributePatch(engine, "step", doubled)
    during = engine.step()
    wrap.restore()

    assert during == "steppedstepped"
    assert engine.step() == "stepped"
    assert "step" not in vars(engine)


def test_an_instance_attribute_is_restored_to_the_very_same_object() -> None:
    engine = Engine()
    engine.step = own = lambda: "own"

    AttributePatch(engine, "step", doubled).restore()

    assert vars(engine)["step"] is own


def test_restoring_a_class_attribute_restores_its_function() -> None:
    original = vars(Engine)["step"]

    wrap = AttributePatch(Engine, "step", lambda function: lambda self: function(self).upper())
    during = Engine().step()
    wrap.restore()

    assert during == "STEPPED"
    assert vars(Engine)["step"] is original


def test_a_wrapper_around_ours_stays_after_a_restore() -> None:
    engine = Engine()
    wrap = AttributePatch(engine, "step", doubled)
    ours = engine.step
    engine.step = theirs = lambda: ours() + "!"

    wrap.restore()
    wrap.restore()

    assert vars(engine)["step"] is theirs


def test_a_patch_does_not_keep_its_owner_alive() -> None:
    engine = Engine()
    wrap = AttributePatch(engine, "step", doubled)
    gone = weakref.ref(engine)

    del engine
    gc.collect()

    assert gone() is None
    wrap.restore()
