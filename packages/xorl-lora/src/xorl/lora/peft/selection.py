"""Finds the layers of a base model that an adapter_config.json names, so that missing layers are detected."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from xorl.lora.spec import matches_name

Names = tuple[str, ...] | str


@dataclass(frozen=True)
class Selection:
    """Selects layers as PEFT does when it adds adapters.

    Attributes:
        targets: names of layers, or a regular expression for their whole names; () if the file names none.
        excluded: layers without an adapter, in the same form as `targets`.
        layers: the indices of the decoder's layers that have adapters; () for all.
        lists: the names of the lists of layers to which `layers` refers; () for any.
        parameters: names of stacked parameters of experts, for files in the form `peft` that xorl did not write.
        saved: modules that are trained whole; neither they nor what is in them has an adapter.
        is_of_peft: whether PEFT wrote the file.
    """

    targets: Names = ()
    excluded: Names = ()
    layers: tuple[int, ...] = ()
    lists: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    is_of_peft: bool = True

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "Selection":
        """Parse the keys of an adapter_config.json. Raises ValueError, naming the key, for values of another type."""
        targets = _names_or_pattern(content, "target_modules")
        return cls(
            targets=() if targets == "all-linear" else targets,
            excluded=_names_or_pattern(content, "exclude_modules"),
            layers=_indices(content, "layers_to_transform"),
            lists=tuple(_listed(content, "layers_pattern")),
            parameters=() if content.get("xorl") else tuple(_listed(content, "target_parameters")),
            saved=tuple(_listed(content, "modules_to_save")),
            is_of_peft="auto_mapping" in content or "peft_version" in content,
        )

    def of(self, modules: Iterable[str]) -> list[str]:
        """The names of layers that are selected, out of `modules`."""
        return [
            name
            for name in modules
            if _matches(name, self.targets) and not self._is_left_out(name) and self._is_in_layers(name)
        ]

    def names(self, module: str) -> bool:
        """Whether `targets` names a layer; True for all layers if the file names none."""
        return not self.targets or _matches(module, self.targets)

    @property
    def is_plain(self) -> bool:
        """Whether the names of `targets` alone select the layers."""
        return isinstance(self.targets, tuple) and not (self.excluded or self.layers)

    def _is_left_out(self, name: str) -> bool:
        return _matches(name, self.excluded) or any(f".{one}." in f".{name}." for one in self.saved)

    def _is_in_layers(self, name: str) -> bool:
        if not self.layers:
            return True
        lists = "|".join(map(re.escape, self.lists)) or r"[^.]+"
        # PEFT takes the first number that follows the name of a list; old versions take the last one.
        found = re.findall(rf"(?<=\.)(?:{lists})\.(\d+)(?=\.)", f".{name}.")
        return bool(found) and {int(found[0]), int(found[-1])} <= {*self.layers}


def _matches(name: str, wanted: Names) -> bool:
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return any(matches_name(name, one) for one in wanted)


def _names_or_pattern(content: Mapping[str, object], key: str) -> Names:
    value = content.get(key)
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{key}: {value!r} is not a valid regular expression: {error}") from error
        return value
    return tuple(_listed(content, key))


def _listed(content: Mapping[str, object], key: str) -> Collection[str]:
    """The names in a list; PEFT also accepts a single name."""
    value = content.get(key) or ()
    value = (value,) if isinstance(value, str) else value
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{key} must be a list of names, got {value!r}")
    return [str(one) for one in value]


def _indices(content: Mapping[str, object], key: str) -> tuple[int, ...]:
    value = content.get(key)
    value = () if value is None else value if isinstance(value, (list, tuple)) else (value,)
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in value):
        raise ValueError(f"{key} must be a list of indices, got {content.get(key)!r}")
    return tuple(int(one) for one in value if isinstance(one, int))
