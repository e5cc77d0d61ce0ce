"""Which modules are sharded as units of their own, and in which order."""

import pytest
from torch import nn

from xorl.core.nn import HeadNorm, NormConfig
from xorl.core.parallel.fsdp import sharding_units

NORM = NormConfig("rms", 1e-6)


class Block(nn.Sequential):
    pass


def test_units_come_innermost_first_and_the_model_is_none_of_them() -> None:
    # Catches an outer unit that is sharded before the layers and takes their parameters.
    model = nn.Sequential(nn.Embedding(3, 2), nn.Sequential(Block(nn.Linear(2, 2)), Block(nn.Linear(2, 2))))
    trunk = model[1]
    layers = list(trunk)
    units = sharding_units(model, ["Linear", "Sequential"], layers)
    assert units == [layers[0][0], layers[1][0], *layers, trunk]


def test_name_of_a_class_is_that_of_its_subclasses() -> None:
    # Catches a name that means nothing any more once a layer keeps or multiplies its weight in another way.
    class Kept(nn.Linear):
        pass

    model = nn.Sequential(Kept(2, 2), nn.Linear(2, 2), nn.Embedding(3, 2))
    assert sharding_units(model, ["Linear"], []) == [model[0], model[1]]
    with pytest.raises(ValueError, match="no module is named Module"):
        sharding_units(model, ["Module"], [])


def test_part_of_a_layer_by_the_name_of_the_layer_is_passed_over() -> None:
    # Catches a layer's name that is refused as soon as an adapter stands beside it, whose parameters bear the name too.
    layer = nn.Linear(2, 2)
    layer.adapter = nn.ModuleDict({"o_proj": HeadNorm(2, NORM)})
    assert sharding_units(nn.ModuleDict({"o_proj": layer}), ["o_proj"], []) == [layer]


def test_name_that_no_module_has_is_refused() -> None:
    # Catches a misspelt module that is silently not sharded on its own.
    with pytest.raises(ValueError, match="no module is named Liner; the model has Linear, Sequential"):
        sharding_units(nn.Sequential(nn.Linear(1, 1)), ["Liner"], [])


def test_module_that_computes_nothing_itself_is_refused() -> None:
    # Catches parameters that are gathered around a forward which never runs, and are sharded when they are read.
    with pytest.raises(ValueError, match="HeadNorm has no forward function, so it cannot be a separate unit"):
        sharding_units(nn.Sequential(nn.Linear(1, 1), HeadNorm(2, NORM)), ["HeadNorm"], [])
