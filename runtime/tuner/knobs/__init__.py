"""The settings that the tuner changes (knobs): classes that read, set and restore them."""
