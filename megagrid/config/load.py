"""A recipe from a TOML file and ``section.key=value`` overrides.

    file, overrides  ->  settings  ->  + preset, derived  ->  Config
                         key: value and origin                typed, frozen

Every setting remembers where it came from, so that an error names the file and line, or the
override, that it is about.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Literal, get_args, get_origin

from pydantic import ValidationError

from megagrid.config import suggest
from megagrid.config.dump import toml_value
from megagrid.config.presets import PRESETS
from megagrid.config.schema import Config
from megagrid.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """A value, and where it was stated: "recipes/a.toml:12", "command line", "preset gpt2"."""

    value: object
    origin: str


Settings = dict[str, Setting]
"""Keyed by "section.key"."""


def load(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """The run that the recipe at `path` describes, with `overrides` in place of its own values.

    What a preset or a derived default adds is stated in the result, so that it stands alone.

    Raises:
        ConfigError: the file can't be read, a key is unknown, missing or of the wrong type.
    """
    settings = _read_recipe(Path(path))
    settings |= _read_overrides(overrides)
    settings = _with_preset(settings)
    settings = _with_derived(settings)
    _refuse_nul(settings)
    return _validate(settings, str(path))


# --- Reading -------------------------------------------------------------------------------------


def _read_recipe(path: Path) -> Settings:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it isn't UTF-8 text"
        raise ConfigError(f"can't read recipe {path}: {reason}") from None
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_syntax_error(path, text, str(error))) from None
    except (ValueError, RecursionError) as error:
        what = "it nests too deep" if isinstance(error, RecursionError) else "a number is too long"
        raise ConfigError(f"can't read recipe {path}: {what}") from None
    settings = {}
    for section, table in tables.items():
        if not isinstance(table, dict):
            origin = _origin(path, text, "", section)
            if section in suggest.KEYS:
                raise ConfigError(
                    f"{origin}: {section}={toml_value(table)} must be a section; write [{section}] "
                    "and its keys below"
                )
            raise _unknown(origin, "", section)
        if section not in suggest.KEYS:
            raise _unknown(_origin(path, text, section), section, "")
        for key, value in table.items():
            origin = _origin(path, text, section, key)
            if key not in suggest.KEYS[section]:
                raise _unknown(origin, section, key)
            settings[f"{section}.{key}"] = Setting(value, origin)
    return settings


def _syntax_error(path: Path, text: str, message: str) -> str:
    """tomllib's message with its position in front: ``file:line: what (column n)``."""
    what, _, position = message.rstrip(")").rpartition(" (at ")
    if place := re.fullmatch(r"line (\d+), column (\d+)", position):
        return f"{path}:{place[1]}: not TOML: {what} (column {place[2]})"
    return f"{path}:{text.count(chr(10)) + 1}: not TOML: {what} (at the end of the file)"


def _origin(path: Path, text: str, section: str, key: str | None = None) -> str:
    """`path` with the line that states [section] or its key; without, if it is written oddly."""
    current = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[+\s*([^\]\s]+)\s*\]", line):
            current = header[1].strip("\"'").partition(".")[0]
            if current == section and (key is None or header[1] == f"{section}.{key}"):
                return f"{path}:{number}"
        elif key is not None and current in ("", section):
            name = key if current == section else f"{section}.{key}"
            if re.match(rf"\s*[\"']?{re.escape(name)}[\"']?\s*[=.]", line):
                return f"{path}:{number}"
    return str(path)


def _read_overrides(overrides: Iterable[str]) -> Settings:
    settings: Settings = {}
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"override {text!r} has no value; write section.key=value")
        section, dot, key = name.strip().partition(".")
        if not dot:
            raise _unknown("command line", "", section)
        if key not in suggest.KEYS.get(section, ()):
            raise _unknown("command line", section, key)
        if name in settings:
            raise ConfigError(
                f"command line: {name} is given twice, as {toml_value(settings[name].value)} and "
                f"{value}; keep one"
            )
        settings[f"{section}.{key}"] = Setting(_parse(section, key, value.strip()), "command line")
    return settings


def _parse(section: str, key: str, text: str) -> object:
    """The value of an override: as in a recipe, or a string without its quotes, or ``none``, which
    clears a key unless it is one of its choices."""
    if not text:
        raise ConfigError(
            f'command line: {section}.{key}= has no value; write none to clear it, "" for no text'
        )
    if text == "none":
        return text if text in _choices(section, key) else None
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # no TOML, or a number or nesting beyond all sense
        return text
    if len(parsed) > 1 or (_is_text(section, key) and not isinstance(parsed["value"], str)):
        return text
    return parsed["value"]


def _is_text(section: str, key: str) -> bool:
    """Whether the key takes any string, so that ``run_dir=2024`` needs no quotes."""
    return str in _choices(section, key)


def _choices(section: str, key: str) -> tuple[object, ...]:
    """The values of a key that has a few, else its types."""
    annotation = Config.model_fields[section].annotation.model_fields[key].annotation
    is_one = not isinstance(annotation, UnionType) and get_origin(annotation) is not Literal
    return (annotation,) if is_one else get_args(annotation)


def _unknown(origin: str, section: str, key: str) -> ConfigError:
    if key:
        what = f"key {_shown(f'{section}.{key}' if section else key)}"
    else:
        what = f"section [{_shown(section)}]"
    return ConfigError(f"{origin}: unknown {what}; {suggest.remedy(section, key)}")


def _shown(name: str) -> str:
    """A name as it was written; quoted, on one line, if it is no name at all."""
    return name if name.isprintable() else toml_value(name)


# --- Filling in ----------------------------------------------------------------------------------


def _with_preset(settings: Settings) -> Settings:
    """The shape of `model.preset` beneath what is stated."""
    if "model.preset" not in settings or settings["model.preset"].value is None:
        return settings
    name, origin = settings["model.preset"].value, settings["model.preset"].origin
    if name not in PRESETS:
        near = suggest.closest(str(name), PRESETS)
        raise ConfigError(
            f"{origin}: model.preset={toml_value(name)} isn't a preset; "
            + (f"did you mean {near}? " if near else "")
            + f"there are {', '.join(PRESETS)}"
        )
    shape = {f"model.{key}": Setting(v, f"preset {name}") for key, v in PRESETS[name].items()}
    return shape | settings


def _with_derived(settings: Settings) -> Settings:
    """`num_kv_heads` and `head_dim` where neither recipe nor preset states them."""
    derived: Settings = {}
    heads, hidden = settings.get("model.num_heads"), settings.get("model.hidden_size")
    if heads is not None:
        derived["model.num_kv_heads"] = Setting(heads.value, heads.origin)
    if heads is not None and hidden is not None and "model.head_dim" not in settings:
        head_dim = _head_dim(hidden, heads)
        if head_dim is not None:
            derived["model.head_dim"] = Setting(head_dim, hidden.origin)
    return derived | settings


def _head_dim(hidden: Setting, heads: Setting) -> int | None:
    """hidden_size / num_heads; None where their types are wrong, which validation reports."""
    h, n = hidden.value, heads.value
    if type(h) is not int or type(n) is not int or h < 1 or n < 1:
        return None
    if h % n:
        raise ConfigError(
            f"{hidden.origin}: model.hidden_size={h} must be a multiple of model.num_heads={n}; "
            f"choose {h // n * n or n} or {(h // n + 1) * n}, or state model.head_dim"
        )
    return h // n


# --- Typing --------------------------------------------------------------------------------------


def _refuse_nul(settings: Settings) -> None:
    """A text with a NUL names no file and no run. Refused here, none gets to the system."""
    for name, setting in settings.items():
        values = setting.value if isinstance(setting.value, list) else [setting.value]
        if any(isinstance(value, str) and "\0" in value for value in values):
            raise ConfigError(
                f"{setting.origin}: {name}={toml_value(setting.value)} has a NUL character in it; "
                "leave it out"
            )


def _validate(settings: Settings, path: str) -> Config:
    tables: dict[str, dict[str, object]] = {section: {} for section in suggest.KEYS}
    for name, setting in settings.items():
        section, _, key = name.partition(".")
        tables[section][key] = setting.value
    try:
        return Config.model_validate(tables)
    except ValidationError as error:
        faults = error.errors(include_url=False)
    missing = [".".join(map(str, fault["loc"])) for fault in faults if fault["type"] == "missing"]
    wrong = [fault for fault in faults if fault["type"] != "missing"]
    messages = [_wrong_value(fault, settings) for fault in wrong]
    if missing and not wrong:
        messages.append(f"{path}: {', '.join(missing)} {_missing_remedy(missing)}")
    raise ConfigError("; ".join(messages))


EXPECTED = MappingProxyType(
    {
        "bool_type": "must be true or false",
        "float_type": "must be a number",
        "int_type": "must be a whole number",
        "list_type": "must be a list",
        "string_type": "must be text",
        "too_short": "must not be empty",
    }
)
"""Kinds of pydantic's faults in a recipe's words; of the others pydantic's message serves."""


def _wrong_value(fault: dict, settings: Settings) -> str:
    """One fault that pydantic found: origin, key=value, what was expected, what to write."""
    section, key, *index = fault["loc"]
    name = f"{section}.{key}" + "".join(f"[{i}]" for i in index)
    expected = EXPECTED.get(fault["type"]) or fault["msg"].replace("Input should", "must", 1)
    value = fault["input"]
    remedy = _remedy(fault["type"], name, value)
    return f"{settings[f'{section}.{key}'].origin}: {name}={toml_value(value)} {expected}{remedy}"


def _remedy(fault_type: str, name: str, value: object) -> str:
    """How the value would have the right type, where it only looks wrong."""
    if fault_type == "int_type" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if fault_type in ("int_type", "float_type") and isinstance(value, str):
        number = _number(value)
        return "" if number is None else f"; write {number} without quotes"
    if fault_type == "list_type" and isinstance(value, str):
        # A shell takes the quotes out of key=["a", "b"].
        items = [item.strip() for item in value.strip("[]").split(",")]
        numbers = [_number(item) for item in items]
        written = items if None in numbers else numbers
        return f"; in a shell write '{name}={toml_value(written)}'"
    return ""


def _number(text: str) -> int | float | None:
    """The number that `text` means, if any."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _missing_remedy(missing: list[str]) -> str:
    if any(name.startswith("model.") for name in missing):
        return f"must be stated, or model.preset, one of {', '.join(PRESETS)}"
    return "must be stated"
