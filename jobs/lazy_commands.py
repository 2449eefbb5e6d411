"""Commands whose modules are imported when they are run: `--help` and completion do not wait for torch and Ray."""

from dataclasses import dataclass
from importlib import import_module

import typer
from typer.core import TyperGroup


@dataclass(frozen=True)
class LazyCommand:
    """Where a command is, and the line that `laserbatch --help` shows of it.

    Parameters
    ----------
    target : "module:name" of a function, or of a Typer app with commands of its own.
    short_help : the first line of the command's own help.
    """

    target: str
    short_help: str

    def load(self, name: str):
        """The command itself, as Typer makes it."""
        module, attribute = self.target.split(":")
        found = getattr(import_module(module), attribute)
        if isinstance(found, typer.Typer):
            command = typer.main.get_command(found)
        else:
            alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
            alone.command(name)(found)
            command = typer.main.get_command(alone)
        command.name = name
        return command


def lazy_group(commands: dict[str, LazyCommand]) -> type[TyperGroup]:
    """A group class that knows these commands by their lines and loads the one that is asked for; no other changes."""

    class LazyGroup(TyperGroup):
        def resolve_command(self, ctx, args):
            name, command, rest = super().resolve_command(ctx, args)
            if command is not None and name in commands:
                command = commands[name].load(name)
            return name, command, rest

    return LazyGroup


def add_lazy_commands(app: typer.Typer, commands: dict[str, LazyCommand]) -> None:
    """Register the lines of the commands, in order; the app's class is `lazy_group(commands)`."""
    for name, command in commands.items():
        app.command(name, help=command.short_help)(lambda: None)
