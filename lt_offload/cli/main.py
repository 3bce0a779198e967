"""The entry point of ``lt-finetune``, which carries out verbs without torch at once.

The other verbs need Lightning's command line, which takes seconds to import: see ``app.py``.
"""

from __future__ import annotations

import codecs
import locale
import os
import sys
import traceback
from collections.abc import Sequence

from lt_offload import __version__
from lt_offload.cli import recipes
from lt_offload.cli.static import pages
from lt_offload.cli.static.completion import ASKED, OPTIONS, answer
from lt_offload.cli.static.settings import check, parse, values
from lt_offload.cli.table import DEFAULT_RECIPE, VERBS, Verb, imported
from lt_offload.errors import ConfigError, OffloadError, named
from lt_offload.finetune import processes
from lt_offload.finetune.terminal import clear, keeping_quiet, status, wrapped
from lt_offload.suggest import did_you_mean


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    The codes are explained in ``static/pages/lt-finetune.txt``, which ``--help`` shows.
    """
    if ASKED in os.environ:  # a shell waits, at every press of the tab key
        answer()
    if argv is None:
        _read_utf8()
    args = list(sys.argv[1:] if argv is None else argv)
    # They are taken out by hand, as they are valid at any place, and for verbs that know nothing of them.
    debug, quiet = "--debug" in args, "--quiet" in args or not processes.is_first()
    args = [arg for arg in args if arg not in ("--debug", "--quiet")]
    try:
        with keeping_quiet(quiet):
            return _dispatch(args)
    except KeyboardInterrupt:
        if processes.is_first():
            print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left, e.g. head
        # Python flushes standard output once more when it ends, and would complain about the pipe then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OffloadError as error:
        return _fail(str(error), debug=debug, code=2)
    # A user can mend permissions, so this is no defect; other errors of the system may be either.
    except PermissionError as error:
        said = f"{str(error.filename)!r}: {error.strerror}" if error.filename else str(error)
        return _fail(said, debug=debug, code=2)
    except Exception as error:  # a defect, ours or a library's: still one line unless asked for more
        return _fail(f"{named(error)} (--debug shows where)", debug=debug, code=1)


def _read_utf8() -> None:
    """Start the program again in Python's UTF-8 mode where the system's texts and names of files are in another code.

    Libraries that read recipes name no encoding, and names in recipes may have characters that another code has not.
    """
    if not sys.flags.utf8_mode and codecs.lookup(locale.getencoding()).name != "utf-8":
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _dispatch(args: list[str]) -> int:
    first = args[0] if args else "--help"
    if first in ("--help", "-h", "help"):
        name = args[1] if args[1:] and args[1] in VERBS else pages.PROGRAM
        pages.show(pages.page(name))
        return 0 if args else 2
    if first == "--version":
        print(f"lt-finetune {__version__}")
        return 0
    verb = VERBS.get(first)
    rest = args if verb is None else args[1:]
    if verb is not None and ({"-h", "--help"} & set(rest[:1]) or (not verb.recipe and {"-h", "--help"} & set(rest))):
        return pages.show(pages.page(verb.name))
    if verb is not None and not verb.recipe:
        words, flags = parse(verb, rest)
        return verb.load()(*words, **flags)
    return _with_recipe(verb or VERBS["fit"], rest)


def _with_recipe(verb: Verb, args: list[str]) -> int:
    """Carry out a verb that needs a recipe, or explain its settings."""
    if verb.default and (not args or args[0].startswith("-")):
        args = [DEFAULT_RECIPE, *args]
    explained = [arg[2:].removesuffix(".help") for arg in args if arg.startswith("--") and arg.endswith(".help")]
    if not args or args[0].startswith("-"):
        if explained:
            return pages.show(pages.group_help(explained[0], {}))
        if args and (hint := did_you_mean(args[0], OPTIONS)):
            raise ConfigError(f"unknown option {args[0]!r}{hint}")
        call = "" if verb.name == "fit" else f"{verb.name} "
        raise ConfigError(f"{verb.name} needs a recipe: lt-finetune {call}RECIPE ('lt-finetune ls' lists recipes)")
    files, flags = recipes.chain(recipes.find(args[0])), args[1:]
    if {"-h", "--help"} & set(flags):
        flags = [flag for flag in flags if flag not in ("-h", "--help")]
        return pages.show(pages.recipe_help(verb.name, files, values(files, flags)))
    if explained:
        return pages.show(pages.group_help(explained[0], values(files)))
    # Slips are found by the static tables within a tenth of a second, before torch is imported.
    check(files, flags, verb)
    os.environ.setdefault("TQDM_LEAVE", "")  # bars of libraries go when they are full; read when they are imported
    if not processes.is_first():
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # the first one has the same warnings
    status(f"lt-finetune {verb.name} {recipes.run_name(files[-1])}: starting PyTorch and Lightning")
    code: int = imported("lt_offload.cli.app").run(verb, files, flags, of_run=recipes.is_run(args[0]))
    return code


def _fail(message: str, *, debug: bool, code: int) -> int:
    if not processes.is_first():
        processes.let_the_first_speak()
        message = f"process {processes.rank()}: {message}"
    clear()
    if debug:
        traceback.print_exc()
    print(wrapped(f"error: {message}"), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
