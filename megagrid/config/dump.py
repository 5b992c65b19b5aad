"""A resolved config as TOML text that `megagrid.config.load` reads back to the same config."""

from __future__ import annotations

import json

from megagrid.config.schema import Config, Section


def dump(config: Config) -> str:
    """Every key of the run with its value, a table per section, in the schema's order.

    An optional key without a value has no TOML form; it is named in a comment, so that the text
    still shows all keys there are.
    """
    tables = (
        f"[{section}]\n{_table(getattr(config, section))}" for section in type(config).model_fields
    )
    return "\n".join(tables)


def toml_value(value: object) -> str:
    """`value` as it is written behind ``key =``; ``none`` where there is none."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's; DEL is the one character that only TOML forbids bare.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {toml_value(item)}' for key, item in value.items())}}}"
    return str(value)


def _table(section: Section) -> str:
    lines = []
    for key in type(section).model_fields:
        value = getattr(section, key)
        lines.append(f"{'# ' if value is None else ''}{key} = {toml_value(value)}\n")
    return "".join(lines)
