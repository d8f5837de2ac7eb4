from pathlib import Path


class DefaultModelLoader:
    def __init__(self, load_config):
        if load_config.load_format not in ("auto", "safetensors"):
            raise ValueError(f"Unknown load_format: {load_config.load_format}")

    def load_weights(self, model, model_config):
        from qerl_jax.checkpoint.safetensors import open_checkpoint

        model.load_weights(open_checkpoint(Path(model_config.model)).items())
