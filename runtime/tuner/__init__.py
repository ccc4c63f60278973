"""The auto-tuner: what holds a job back, what to change, and the proof that it helped."""
