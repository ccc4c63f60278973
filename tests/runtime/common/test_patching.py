"""Tests of patches: what was wrapped is restored to the very same object."""

from __future__ import annotations

import gc
import weakref

from zerowatch.runtime.common.patching import AttributePatch, MethodPatches, PatchSet


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


class Library:
    @staticmethod
    def first() -> str:
        return "first"

    @staticmethod
    def second() -> str:
        return "second"


def test_a_set_wraps_what_the_owner_has_and_restores_it_from_the_last_patch_on() -> None:
    library, patches = Library(), PatchSet()

    patches.add(library, "first", doubled)
    patches.add(library, "first", lambda original: lambda: original() + "!")
    patches.add_existing(library, ("second", "third"), doubled)
    during = (len(patches), library.first(), library.second())
    patches.restore()
    patches.restore()

    assert during == (3, "firstfirst!", "secondsecond")
    assert (len(patches), vars(library)) == (0, {})
    assert (library.first(), library.second()) == ("first", "second")


def test_a_wrapper_has_the_name_of_the_original() -> None:
    engine = Engine()

    AttributePatch(engine, "step", doubled)

    assert engine.step.__name__ == "step"


def test_a_replaced_method_is_called_until_the_patches_are_closed() -> None:
    engine = Engine()
    patches = MethodPatches(engine)

    patches.replace("step", doubled)
    kept = engine.step
    during = engine.step()
    patches.close()
    patches.close()

    assert during == "steppedstepped"
    assert kept() == "stepped"  # a wrapper around ours still calls it
    assert vars(engine) == {}
