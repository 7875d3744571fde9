"""What a version must contain, asked of transformers: names, shapes and dtypes that it would save.

The model is built on the meta device, so no weights exist and 671B parameters take seconds. From
release 5 on, transformers holds experts fused in memory and saves them one by one: its own
conversion back, which `save_pretrained` uses, gives the names that stand in files.

This is an adapter: the only module of the writers that imports torch and transformers.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final, cast

from ..schemas.dtypes import DType
from ..schemas.errors import MissingDependencyError, OriginError
from .conversion.dims import text_config
from .expectation import Expectation

_DTYPES: Final[dict[str, DType]] = {
    "torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16",
    "torch.bfloat16": "BF16", "torch.int64": "I64", "torch.int32": "I32", "torch.bool": "BOOL",
}  # fmt: skip
_QUANTIZED: Final = "quantization_config"
_NEXT: Final = "give the origin checkpoint's folder or its index instead of a config alone"


def expectation_of_config(config: Mapping[str, object]) -> Expectation:
    """The tensors that transformers' own model of this config would save.

    A quantized config is taken without its quantization: files of the plain dtype. MTP layers are
    in no model of transformers; they are not expected.

    Args:
        config: a config.json.

    Raises:
        MissingDependencyError: no torch or transformers of release 5.
        OriginError: transformers knows no such model, or cannot build it.
    """
    torch, transformers = _peer("torch"), _peer("transformers")
    loading = _peer("transformers.core_model_loading")
    plain = {key: value for key, value in config.items() if key != _QUANTIZED}
    try:
        model_class, built = _model_of(transformers, plain)
        dtype = _dtype(torch, plain)
        # Saved models have no quantization, and initialising nothing costs nothing.
        with torch.device("meta"), _default_dtype(torch, dtype):
            model = model_class._from_config(built, dtype=dtype)  # noqa: SLF001 - what from_config calls
        state = loading.revert_weight_conversion(model, _saved_state(model))
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise OriginError(
            f"transformers {transformers.__version__} cannot build the model of this config: "
            f"{error!r:.300}",
            where={"model_type": config.get("model_type")},
            next_step=_NEXT,
        ) from error
    strict = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    buffers = {name.rsplit(".", 1)[-1] for name, _ in model.named_buffers()}
    kept = buffers & set(strict)
    return Expectation.of(
        {
            name: (
                "F32" if name.rsplit(".", 1)[-1] in kept else _DTYPES[str(tensor.dtype)],
                tuple(int(n) for n in tensor.shape),
            )
            for name, tensor in state.items()
        }
    )


def _peer(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"{name} is not installed; the expected tensors of a config alone are asked of it",
            next_step="pip install 'transformers>=5' torch; or give the origin checkpoint's folder",
        ) from error


def _model_of(transformers: Any, config: Mapping[str, object]) -> tuple[Any, Any]:
    """The model's class and config: by architecture, which custom model types state too."""
    given = config.get("architectures")
    names = [str(name) for name in cast("list[object]", given)] if isinstance(given, list) else []
    model_class = getattr(transformers, names[0], None) if names else None
    if model_class is not None:
        values = {
            key: value for key, value in config.items() if key not in ("model_type", "auto_map")
        }
        return model_class, model_class.config_class(**values)
    model_type = config.get("model_type")
    values = {key: value for key, value in config.items() if key != "model_type"}
    built = transformers.AutoConfig.for_model(model_type, **values)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        if type(built) in auto._model_mapping:  # noqa: SLF001 - the table behind from_config
            return auto._model_mapping[type(built)], built  # noqa: SLF001
    raise ValueError(f"no model with a language head for {model_type!r}")


def _dtype(torch: Any, config: Mapping[str, object]) -> Any:
    text = text_config(config)
    for values in (config, text):
        for key in ("dtype", "torch_dtype"):
            name = values.get(key)
            if isinstance(name, str):
                return getattr(torch, name)
    return torch.bfloat16


def _saved_state(model: Any) -> dict[str, Any]:
    """The state without the keys that saving leaves out: tied copies, ignored ones."""
    tied = cast("dict[str, str]", getattr(model, "all_tied_weights_keys", None) or {})
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


@contextmanager
def _default_dtype(torch: Any, dtype: Any) -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
