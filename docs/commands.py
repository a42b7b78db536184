"""The page of the command line, from the commands themselves. `generate.py` writes it."""

from __future__ import annotations

from collections.abc import Iterator

import click

from flask_idempotency.cli import cli

_HEAD = """\
# The command line

{notice}
[Operating it by hand](operations.md) says what they are for.

| exit code | means |
| --- | --- |
| 0 | all is in order, or was done |
| 1 | something is not in order, or the command was refused: one sentence says why, and nothing was changed |
| 2 | nobody can tell, because the store did not answer; or something was mistyped |

With `--json` one object is printed for machines, and an error as `{{"error": "…"}}`.

"""


def page(notice: str) -> str:
    """Everything that a command's own help says."""
    return _HEAD.format(notice=notice) + "\n\n".join(_section(name, command) for name, command in commands(cli)) + "\n"


def subcommands(group: click.Group) -> dict[str, click.Command]:
    """Every command of this group by its name. A lazy group imports them."""
    context = click.Context(group)
    found = {name: group.get_command(context, name) for name in sorted(group.list_commands(context))}
    return {name: command for name, command in found.items() if command is not None}


def commands(group: click.Group, *above: str) -> Iterator[tuple[str, click.Command]]:
    """Every command by its whole name."""
    for name, command in subcommands(group).items():
        if isinstance(command, click.Group):
            yield from commands(command, *above, name)
        else:
            yield " ".join((*above, name)), command


def _section(name: str, command: click.Command) -> str:
    arguments = [f"[{each.name or ''}]".upper() for each in command.params if isinstance(each, click.Argument)]
    options = [_option(each) for each in command.params if isinstance(each, click.Option)]
    paragraphs = [" ".join(each.split()) for each in (command.help or "").split("\n\n")]
    heading = " ".join((f"### `{name}", *arguments)) + "`"
    return "\n\n".join([heading, *paragraphs, *(["\n".join(options)] if options else [])])


def _option(option: click.Option) -> str:
    """In our own words: those of `--help` differ from one release of click to the next."""
    said = [option.help or "", "Required." if option.required else "", _default(option)]
    spelled = " ".join(filter(None, (", ".join(option.opts), _value(option))))
    return f"* `{spelled}`: {' '.join(filter(None, said))}"


def _value(option: click.Option) -> str:
    if option.is_flag:
        return ""
    if isinstance(option.type, click.Choice):
        return "|".join(option.type.choices)
    return option.metavar or ("TEXT" if option.type is click.STRING else "N")


def _default(option: click.Option) -> str:
    if isinstance(option.show_default, str):
        return f"Default: {option.show_default}."
    return f"Default: {option.default:g}." if option.show_default else ""
