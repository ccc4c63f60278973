"""Callbacks for training frameworks: Hugging Face's Trainer, Accelerate, Lightning.

Each module imports its library, and is imported only when its class is first used.
"""
