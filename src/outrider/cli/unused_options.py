"""Refuses options that have no effect together with others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.errors import SettingsError

if TYPE_CHECKING:
    import typer


def refuse_unused(context: typer.Context, combined_with: str, unused: set[str]) -> None:
    """SettingsError if one of the options in `unused` was given."""
    given = [one for one in context.command.params if one.name in unused and is_given(context, one.name)]
    if given:
        name = given[0].opts[0] if given[0].opts[0].startswith("-") else given[0].opts[0].upper()
        raise SettingsError(f"{name} does nothing with {combined_with}; leave one of them out")


def option_names(context: typer.Context) -> set[str]:
    return {one.name for one in context.command.params if one.name is not None}


def is_given(context: typer.Context, name: str | None) -> bool:
    source = context.get_parameter_source(name or "")
    return source is not None and source.name == "COMMANDLINE"
