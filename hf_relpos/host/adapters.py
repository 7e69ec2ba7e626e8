"""PEFT's tables of the layers that an adapter goes on, by model type; there is no other way to add to them."""

TABLES = "TRANSFORMERS_MODELS_TO_"


def register_targets(model_type: str, like: str) -> None:
    """Adapters go on the layers that they go on in models of another type, unless others are given.

    Importing PEFT here costs nothing: Transformers does so for its callbacks, of which `hf_relpos` has one.
    """
    from peft.utils import constants

    for name, targets in vars(constants).items():
        if name.startswith(TABLES) and isinstance(targets, dict) and like in targets:
            targets.setdefault(model_type, targets[like])
