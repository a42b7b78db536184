"""The page of the command line, from the commands themselves. `generate.py` writes it."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Final

import click

from flask_idempotency.cli import EXIT_CODES, cli

_EXAMPLE: Final = "\b\nExample:\n"
"""The first lines of the paragraph that holds the example. The first keeps click from wrapping it."""

_SHARED_BY: Final = 3
"""An option with the same text in this many commands is explained once, at the top of the page."""

_SAID_ONCE: Final = (
    "If another process runs this task, the command does nothing and exits with 0.",
    "You confirm first.",
)
"""Sentences of several commands, which the top of the page has. A command's own help has them too."""

_HEAD: Final = """\
# The command line

{notice}
[Records](../operate/records.md) says which command helps, and [pictures](../operate/screenshots.md) show what they print.

| exit code | means |
| --- | --- |
{codes}

Code 1 comes with one sentence that says why. A command that refuses has changed nothing.
One with `--yes` asks you to confirm. A task that another process runs does nothing and exits with 0.
With `--json` a command prints one object for machines, and an error as `{{"error": "…"}}`. The codes are the same.

## Complete commands with Tab

Write these lines once. Then Tab completes commands, options and states, and endpoints if your application can be loaded.

For bash:

```console
$ _FLASK_COMPLETE=bash_source flask > ~/.flask-complete.bash
$ echo '. ~/.flask-complete.bash' >> ~/.bashrc
$ exec bash
```

For zsh, if your `~/.zshrc` calls `compinit`:

```console
$ _FLASK_COMPLETE=zsh_source flask > ~/.flask-complete.zsh
$ echo '. ~/.flask-complete.zsh' >> ~/.zshrc
$ exec zsh
```

For fish:

```console
$ mkdir -p ~/.config/fish/completions
$ _FLASK_COMPLETE=fish_source flask > ~/.config/fish/completions/flask.fish
$ exec fish
```

## Options of several commands

{shared}

"""


def page(notice: str) -> str:
    """Everything that a command's own help says."""
    codes = "\n".join(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES)
    found = list(commands(cli))
    uses = Counter(_explained(each) for _, command in found for each in _options(command))
    shared = {option for option, count in uses.items() if count >= _SHARED_BY}
    return (
        _HEAD.format(notice=notice, codes=codes, shared="\n".join(sorted(shared)))
        + "\n\n".join(_section(name, command, shared) for name, command in found)
        + "\n"
    )


def subcommands(group: click.Group) -> dict[str, click.Command]:
    """Every command of this group by its name, in the order of its help. A lazy group imports them."""
    context = click.Context(group)
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


def commands(group: click.Group, *above: str) -> Iterator[tuple[str, click.Command]]:
    """Every command by its whole name."""
    for name, command in subcommands(group).items():
        if isinstance(command, click.Group):
            yield from commands(command, *above, name)
        else:
            yield " ".join((*above, name)), command


def examples(command: click.Command) -> list[str]:
    """Return the command lines that the help of this command shows as examples."""
    return [
        line.strip().removeprefix("$ ")
        for paragraph in _paragraphs(command)
        if paragraph.startswith(_EXAMPLE)
        for line in paragraph.removeprefix(_EXAMPLE).strip().splitlines()
    ]


def _paragraphs(command: click.Command) -> list[str]:
    return inspect.cleandoc(command.help or "").split("\n\n")


def _options(command: click.Command) -> list[click.Option]:
    return [each for each in command.params if isinstance(each, click.Option)]


def _section(name: str, command: click.Command, shared: Collection[str]) -> str:
    arguments = [f"[{each.name or ''}]".upper() for each in command.params if isinstance(each, click.Argument)]
    options = [_option(each) for each in _options(command) if _explained(each) not in shared]
    if also := [each for each in _options(command) if _explained(each) in shared]:
        named = ", ".join(map(_named, also))
        options.append(f"* [Shared](#options-of-several-commands): {named}.")
    text = [_without_shared(" ".join(each.split())) for each in _paragraphs(command) if not each.startswith(_EXAMPLE)]
    console = ["```console", *(f"$ {line}" for line in examples(command)), "```"]
    heading = " ".join((f"## `{name}", *arguments)) + "`"
    return "\n\n".join([heading, *text, "\n".join(console), *(["\n".join(options)] if options else [])])


def _without_shared(paragraph: str) -> str:
    for sentence in _SAID_ONCE:
        paragraph = paragraph.replace(sentence, "").replace("  ", " ").strip()
    return paragraph


def _option(option: click.Option) -> str:
    return _explained(option) + _number(option, " Default: {:g}.") + (" Required." if option.required else "")


def _named(option: click.Option) -> str:
    return f"`{option.opts[-1]}`" + _number(option, " ({:g})") + (" (required)" if option.required else "")


def _explained(option: click.Option) -> str:
    """In our own words: those of `--help` differ from one release of click to the next."""
    spelled = " ".join(filter(None, (", ".join(option.opts), _value(option))))
    default = f"Default: {option.show_default}." if isinstance(option.show_default, str) else ""
    return f"* `{spelled}`: {' '.join(filter(None, (option.help or '', default)))}"


def _value(option: click.Option) -> str:
    if option.is_flag:
        return ""
    if isinstance(option.type, click.Choice):
        return "|".join(option.type.choices)
    return option.metavar or ("TEXT" if option.type is click.STRING else "N")


def _number(option: click.Option, form: str) -> str:
    """Return the default in this form, if it is a number. Commands that share an option may have different ones."""
    return form.format(option.default) if option.show_default is True else ""
