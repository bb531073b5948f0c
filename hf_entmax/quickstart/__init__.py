"""The main job on embedded data: train, patch, fine-tune, save, reload in a fresh process, measure, draw."""

from hf_entmax.quickstart.workflow import run

__all__ = ["run"]
