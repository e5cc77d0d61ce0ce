"""A flat list of all options with path, group, type, default and description, and suggestions for misspelt names.

Options of list entries are written `data.datasets[].path`. The default root is local training. The options of the
service have no sections, so their paths are their names.
"""

import difflib
import inspect
import json
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal, Union, get_args, get_origin

from annotated_types import BaseMetadata, Ge, Gt, Le, Lt, MinLen, MultipleOf
from pydantic import Secret
from pydantic.fields import FieldInfo

from xorl.config.document import resolve_scalar
from xorl.config.fields import Section
from xorl.config.local import Config

ENTRIES = "data.datasets[]"
ENTRY_LISTS = ("data.datasets", "data.test_datasets")
MEMBERS = "lora.sweep[]"
MEMBER_LIST = "lora.sweep"
ENDPOINT_LIST = "inference_endpoints"  # an option of the service
# The list that contains the entries at each documented path.
OWNERS = {ENTRIES: ENTRY_LISTS[0], MEMBERS: MEMBER_LIST, f"{ENDPOINT_LIST}[]": ENDPOINT_LIST}
# The fewest characters by which a choice is recognised from its beginning.
_MIN_BEGINNING = 3
# Names in other trainers that are too different for a spelling suggestion.
OTHER_NAMES = {
    "adapter": "enable_lora",
    "alpha": "lora_alpha",
    "base_model": "model_path",
    "batch_size": "micro_batch_size",
    "bf16": "enable_mixed_precision",
    "cutoff_len": "sample_packing_sequence_len",
    "epochs": "num_train_epochs",
    "learning_rate": "lr",
    "load_in_4bit": "enable_qlora",
    "logging_steps": "wandb_log_interval",
    "lr_scheduler": "lr_decay_style",
    "lr_scheduler_type": "lr_decay_style",
    "max_length": "sample_packing_sequence_len",
    "max_seq_length": "sample_packing_sequence_len",
    "model_name_or_path": "model_path",
    "num_epochs": "num_train_epochs",
    "per_device_train_batch_size": "micro_batch_size",
    "rank": "lora_rank",
    "report_to": "use_wandb",
    "resume_from_checkpoint": "load_checkpoint_path",
    "run_name": "wandb_name",
    "seq_len": "sample_packing_sequence_len",
    "sequence_len": "sample_packing_sequence_len",
    "target_modules": "lora_target_modules",
    "train_on_inputs": "train_on",
    "warmup_ratio": "lr_warmup_ratio",
    "warmup_steps": "lr_warmup_ratio",
}
BOUNDS: tuple[tuple[type[BaseMetadata], str, str], ...] = (
    (Ge, "ge", ">="),
    (Gt, "gt", ">"),
    (Le, "le", "<="),
    (Lt, "lt", "<"),
    (MultipleOf, "multiple_of", "a multiple of"),
)
TYPE_NAMES: dict[object, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "true or false",
    types.NoneType: "null",
}


@dataclass(frozen=True)
class Option:
    """An option. `default` is YAML text, or None if the option is required."""

    path: str
    group: str
    type: str
    default: str | None
    description: str
    annotation: object

    @property
    def name(self) -> str:
        return self.path.rsplit(".", 1)[-1]

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed strings of an enumeration; empty for other types."""
        return tuple(choice for choice in _literals(self.annotation) if isinstance(choice, str))

    @property
    def is_secret(self) -> bool:
        """Whether the value must never be displayed."""
        return any(get_origin(annotation) is Secret for annotation in (self.annotation, *get_args(self.annotation)))


@cache
def all_options(root: type[Section] = Config) -> dict[str, Option]:
    """Returns every option by path, in documentation order."""
    return {option.path: option for option in _options_of(root, "")}


def find_option(path: str, root: type[Section] = Config) -> Option | None:
    """Returns the option at a path; an index in a list of entries matches any entry."""
    return all_options(root).get(documented_path(path))


def documented_path(path: str) -> str:
    """Returns the path under which an option is documented: `data.datasets[].path` for `data.test_datasets.0.path`.

    The datasets of sweep members are documented there too. Paths outside lists are returned unchanged.
    """
    path = re.sub(r"^(data\.(test_)?|lora\.sweep\.\d+\.)datasets\.\d+(?=\.|$)", ENTRIES, path)
    path = re.sub(rf"^{ENDPOINT_LIST}\.\d+(?=\.|$)", f"{ENDPOINT_LIST}[]", path)
    return re.sub(r"^lora\.sweep\.\d+(?=\.|$)", MEMBERS, path)


def entries_of(config: Section, section: str) -> Iterator[tuple[str, Section]]:
    """Yields (path, options) for each section documented as `section`: the section itself, or every entry of its lists.

    For options without sections this is the configuration itself, with an empty path.
    """
    if not section:
        yield "", config
    elif section not in OWNERS:
        yield section, getattr(config, section)
    elif isinstance(config, Config) and section == ENTRIES:
        lists = {"data.datasets": config.data.datasets, "data.test_datasets": config.data.test_datasets}
        for index, member in enumerate(config.lora.sweep):
            lists[f"{MEMBER_LIST}.{index}.datasets"] = member.datasets or []
        for path, entries in lists.items():
            yield from ((f"{path}.{index}", entry) for index, entry in enumerate(entries))
    else:
        owner = OWNERS[section]
        *parents, name = owner.split(".")
        holder = getattr(config, parents[0]) if parents else config
        yield from ((f"{owner}.{index}", entry) for index, entry in enumerate(getattr(holder, name)))


def is_entry(path: str) -> bool:
    """Whether a path names an entry of a list, not an option of an entry."""
    return documented_path(path) in OWNERS


def entry_type(path: str, root: type[Section] = Config) -> type[Section]:
    """Returns the type of the entry at a path for which `is_entry` holds."""
    found = _entry_type(all_options(root)[OWNERS[documented_path(path)]].annotation)
    assert found is not None
    return found


def sections(root: type[Section] = Config) -> tuple[str, ...]:
    """Returns all sections, including the documented paths of list entries."""
    return tuple(dict.fromkeys(option.section for option in all_options(root).values()))


def suggestion(path: str, root: type[Section] = Config) -> tuple[str, str | None]:
    """Returns the message for an unknown option, and the path of the option that was probably meant.

    Tries in this order: another trainer's name for an option of the same section, the same name in another section,
    another trainer's name for an option of another section, a similar name in the same section, and a similar name in
    another section.
    """
    section, _, name = path.rpartition(".")
    options = all_options(root).values()
    here = [option.name for option in options if option.section == documented_path(section)]
    here += [] if section else root.model_fields
    elsewhere = {option.name: option for option in reversed(options)}
    near = difflib.get_close_matches(name, here, n=1, cutoff=0.65)
    far = difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.8)
    other = OTHER_NAMES.get(name)
    if other in here:
        return _meant_here(section, other)
    if name in elsewhere:
        meant = elsewhere[name]
        return f"unknown option here; {name} belongs in {_location(meant)}: {meant.path}", meant.path
    if other in elsewhere:
        return _meant_elsewhere(elsewhere[other])
    if near:
        return _meant_here(section, near[0])
    if far:
        return _meant_elsewhere(elsewhere[far[0]])
    if not here:
        return "unknown option; see `xorl config docs`", None
    command = ["xorl config docs", "" if root is Config else "--service", documented_path(section)]
    return f"unknown option; `{' '.join(filter(None, command))}` lists the valid ones", None


def _meant_here(section: str, name: str) -> tuple[str, str]:
    path = f"{section}.{name}" if section else name
    return f"unknown option; did you mean {path}?", documented_path(path)


def _meant_elsewhere(option: Option) -> tuple[str, str]:
    return f"unknown option; did you mean {option.path} (in {_location(option)})?", option.path


def suggest_choice(option: Option, value: str) -> str | None:
    """Returns the allowed value that begins with the given one or is most similar to it, or None."""
    choices = [choice.lower() for choice in option.choices]
    begun = [choice for choice in choices if len(value) >= _MIN_BEGINNING and choice.startswith(value.lower())]
    near = begun if len(begun) == 1 else difflib.get_close_matches(value.lower(), choices, n=1)
    return next((choice for choice in option.choices if near and choice.lower() == near[0]), None)


def _location(option: Option) -> str:
    return f"the entries of {OWNERS[option.section]}" if option.section in OWNERS else f"section {option.section}"


def _options_of(section: type[Section], prefix: str) -> Iterator[Option]:
    entries: list[Option] = []
    for name, info in section.model_fields.items():
        path = f"{prefix}{name}"
        entry = _entry_type(info.annotation)
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            yield from _options_of(info.annotation, f"{path}.")
            continue
        yield Option(
            path=path,
            group=_group(section, name),
            type=type_text(info.annotation, info.metadata),
            default=None if info.is_required() else yaml_text(info.default),
            description=info.description or "",
            annotation=info.annotation,
        )
        # Nested lists contain dataset entries too, which are documented only once.
        if entry and path in OWNERS.values():
            entries = list(_options_of(entry, f"{path}[]."))
    yield from entries


def _group(section: type[Section], name: str) -> str:
    """Returns the title of the group that declares a field."""
    owner = next(base for base in section.__mro__ if name in inspect.get_annotations(base))
    return owner.__doc__ or ""


def yaml_text(value: object) -> str:
    """Returns one line of YAML that parses to the value, quoted only if necessary."""
    if isinstance(value, str):
        is_plain = re.fullmatch(r"[A-Za-z./][\w./ +@%=()-]*(?<! )", value) and resolve_scalar(value) == value
        return value if is_plain else json.dumps(value, ensure_ascii=False).replace("${", "$${")
    if isinstance(value, Section):
        return yaml_text(value.model_dump())
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(yaml_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{yaml_text(key)}: {yaml_text(item)}' for key, item in value.items())}}}"
    return json.dumps(value)


def type_text(annotation: object, metadata: Iterable[object] = ()) -> str:
    """Describes a type and its range in words, such as `integer >= 1 or null`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if any(isinstance(item, MinLen) for item in metadata):
        return f"{type_text(annotation)} (not empty)"
    if origin is Annotated:
        inner = [item for extra in arguments[1:] if isinstance(extra, FieldInfo) for item in extra.metadata]
        return type_text(arguments[0], inner)
    if origin in (Union, types.UnionType):
        null_last = sorted(arguments, key=lambda argument: argument is types.NoneType)
        return " or ".join(map(type_text, null_last))
    if origin is Literal:
        return f"{'one of ' if len(arguments) > 1 else ''}{', '.join(map(str, arguments))}"
    if origin is Secret:
        return type_text(arguments[0])
    if origin is list:
        return f"list of {_plural(arguments[0])}"
    if origin is dict:
        is_plain = get_origin(arguments[1]) is Annotated
        return f"mapping to {type_text(arguments[1])}" if is_plain else "mapping"
    bounds = [
        f"{sign} {f'{bound:g}' if isinstance(bound := getattr(item, attribute), float) else bound}"
        for kind, attribute, sign in BOUNDS
        for item in metadata
        if isinstance(item, kind)
    ]
    return " ".join([TYPE_NAMES.get(annotation, "mapping"), " and ".join(bounds)]).rstrip()


def _plural(annotation: object) -> str:
    if annotation is str:
        return "strings"
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, get_args(annotation)))
    assert isinstance(annotation, type), "lists contain strings, choices or entries"
    name = (annotation.__doc__ or "").lower()
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"


def _literals(annotation: object) -> Iterator[object]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for argument in get_args(annotation):
            yield from _literals(argument)


def _entry_type(annotation: object) -> type[Section] | None:
    entry = get_args(annotation)[0] if get_origin(annotation) is list else None
    return entry if isinstance(entry, type) and issubclass(entry, Section) else None


def changed_options(section: Section, names: Iterable[str]) -> Iterator[tuple[str, object, object]]:
    """Yields (name, value, default) of each of the named options of a section that is not at its default."""
    for name in names:
        value, default = getattr(section, name), type(section).model_fields[name].default
        if value != default:
            yield name, value, default
