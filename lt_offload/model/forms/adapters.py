"""Adapters of stored weights, with peft's own classes, names and files; and what libraries cannot do with such weights.

Those of linear layers compute beside the layer. Merging, DoRA and most values of ``init_lora_weights`` read its weight,
and would take the bytes of a stored one for numbers: they are refused, and so is ``save_pretrained`` of the model
itself. Those of experts (``target_parameters``) peft adds to the whole weight. Stored experts have no such tensor: rows
go through the two low-rank matrices of their expert beside its product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lt_offload.compat.hugging_face import class_of_all_models, saves_adapters_only
from lt_offload.compat.peft import dora, initializers, layer_adapter, parameter_adapter, use_parameter_adapter
from lt_offload.errors import ConfigError
from lt_offload.machine.replaced import own_attribute
from lt_offload.model.forms.experts import ADAPTERS, Factors
from lt_offload.model.forms.layer import stored_of


def adapt_stored() -> None:
    """Let peft make adapters of stored experts, and libraries refuse what reads a stored weight."""
    _check_saving()
    plain: Any = parameter_adapter()
    if plain is None or hasattr(plain, "knows_stored"):
        return
    merging = "adapters cannot be merged into stored weights: call lt_offload.open_weights(model) first"
    of_layer = layer_adapter()
    for kind in (plain, of_layer):
        kind.merge = _refused(kind.merge, merging)
    for name in initializers():
        way = f"init_lora_weights={name.removesuffix('_init')!r}"
        why = f"{way} needs weights that are not stored: set it to True or 'gaussian'"
        setattr(of_layer, name, _refused(getattr(of_layer, name), why))
    dora().init = staticmethod(
        _refused(dora().init, "use_dora=True needs weights that are not stored: set it to False")
    )

    class ParamWrapper(plain):  # type: ignore[misc]
        """The same adapter; of a stored weight it knows the shape, and hands the module its factors."""

        knows_stored = True

        def _get_in_out_features(self, module: nn.Module) -> Any:
            stored = stored_of(self.get_base_layer()).get(self.parameter_name)
            if stored is None:
                return super()._get_in_out_features(module)
            self.num_experts, first, second = stored.shape
            self._param_ndim = len(stored.shape)
            return first, second

        @contextmanager
        def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
            base = self.get_base_layer()
            if self.parameter_name not in stored_of(base):
                with super()._activate_lora(active_adapters):
                    yield
                return
            before = vars(base).get(ADAPTERS, {})
            mine = [self._factors(name) for name in active_adapters if name in self.lora_A]
            with own_attribute(base, ADAPTERS, before | {self.parameter_name: mine}):
                yield

        def _factors(self, name: str) -> Factors:
            first, second = self.lora_A[name].weight, self.lora_B[name].weight
            first = first.reshape(self.num_experts, -1, first.shape[-1])
            second = second.reshape(second.shape[0], -1, self.num_experts).permute(2, 0, 1)
            return first, second, self.scaling[name]

    # Pickle finds a class by its names: it is peft's own from here on.
    ParamWrapper.__module__, ParamWrapper.__qualname__ = plain.__module__, plain.__qualname__
    use_parameter_adapter(ParamWrapper)


def _check_saving() -> None:
    """Let ``save_pretrained`` refuse models with stored weights; it goes on writing adapters alone."""
    models = class_of_all_models()
    if models is not None and not hasattr(models, "knows_stored"):
        why = (
            "save_pretrained() would write the pieces of stored weights, which transformers takes for numbers: call "
            "lt_offload.open_weights(model) first, or save adapters alone, with the save_pretrained() of peft's model"
        )
        models.save_pretrained, models.knows_stored = _refused(models.save_pretrained, why, writes_pieces), True


def writes_pieces(model: Any) -> bool:
    """Return whether ``save_pretrained`` of ``model`` would write stored weights, so that it is refused."""
    models = class_of_all_models()
    if models is None or not isinstance(model, models):
        return False
    return not saves_adapters_only(model) and any(map(stored_of, model.modules()))


def _of_stored(adapter: Any) -> bool:
    return bool(stored_of(adapter.get_base_layer()))


def _refused(method: Callable[..., Any], why: str, when: Callable[[Any], bool] = _of_stored) -> Callable[..., Any]:
    """Return ``method``, which raises ``ConfigError`` of the objects that ``when`` is true of."""

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if when(self):
            raise ConfigError(why)
        return method(self, *args, **kwargs)

    return checked
