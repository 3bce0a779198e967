"""``lt-finetune``: finds out what is asked for, and answers at once what needs no torch.

The other verbs are Lightning's command line, which takes seconds to import: see ``app.py``.
"""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Sequence

from lt_offload import __version__
from lt_offload.cli import recipes
from lt_offload.cli.progress import keeping_quiet, say
from lt_offload.cli.static.arguments import parse
from lt_offload.cli.table import VERBS
from lt_offload.errors import ConfigError, OffloadError

USAGE = """\
usage: lt-finetune RECIPE [--key value ...]            fine-tune
       lt-finetune RECIPE --resume                     go on from the newest checkpoint of its last run
       lt-finetune plan RECIPE [--memory 12GB] [--hardware NAME] [--save plan.json] [--report plan.html]
       lt-finetune plan RECIPE --sweep memory=6GB:24GB  which card do I need? (or hardware=rtx-3060,rtx-3090)
       lt-finetune validate RECIPE [--ckpt_path FILE]  loss on held-out data
       lt-finetune generate RECIPE [--ckpt_path FILE] [--prompt TEXT]
       lt-finetune export RECIPE --output FOLDER [--ckpt_path FILE]
       lt-finetune check RECIPE                        is every setting known and of the right type?
       lt-finetune ls                                  list the recipes that come with it
       lt-finetune cp RECIPE FILE                      copy one, to change it
       lt-finetune doctor [--save machine.yaml]        what this machine can do, for plan --hardware machine.yaml
       lt-finetune --version | --help

RECIPE is a YAML file or the name of a shipped one. Any setting can be given on the command line:
  lt-finetune quickstart --trainer.strategy.memory 600MB --model.lora.r 8 --trainer.max_steps 20
'lt-finetune RECIPE --help' explains every setting, '--print_config' prints them all with their values.
--explain shows the whole plan, --quiet only results, warnings and errors, --debug where an error comes from.
Ctrl-C and SIGTERM end the iteration and write a checkpoint (exit codes 130 and 143); the second one does not wait.
"""
_OPTIONS = ("--version", "--help", "--quiet", "--debug")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    That is 0, 2 for something the user can mend, 1 for a defect, 130 after Ctrl-C and 143 after SIGTERM.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    debug, quiet = "--debug" in args, "--quiet" in args
    args = [arg for arg in args if arg not in ("--debug", "--quiet")]
    try:
        with keeping_quiet(quiet):
            return _dispatch(args)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left, e.g. head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OffloadError as error:
        return _fail(str(error), debug=debug, code=2)
    except Exception as error:  # a defect, ours or a library's: still one line unless asked for more
        first = (str(error).strip() or "no message").splitlines()[0]
        return _fail(f"{type(error).__name__}: {first} (--debug shows where)", debug=debug, code=1)


def _dispatch(args: list[str]) -> int:
    verb = args[0] if args else "--help"
    if verb in ("--help", "-h", "help"):
        print(USAGE, end="")
        return 0 if args else 2
    if verb == "--version":
        print(f"lt-finetune {__version__}")
        return 0
    found = VERBS.get(verb)
    if found is not None and not found.recipe:
        words, flags = parse(found.read(), args[1:])
        return found.load()(*words, **flags)
    if found is not None:
        args = args[1:]
    else:
        verb = "fit"
    if not args or (args[0].startswith("-") and args[0] not in ("-h", "--help")):
        near = difflib.get_close_matches(args[0], _OPTIONS, n=1) if args else []
        if near:
            raise ConfigError(f"unknown option {args[0]!r}; did you mean {near[0]}?")
        raise ConfigError(f"{verb} needs a recipe: lt-finetune {'' if verb == 'fit' else verb + ' '}RECIPE")
    if args[0].startswith("-"):
        print(USAGE, end="")
        return 0
    files = recipes.chain(recipes.find(args[0]))
    say(f"lt-finetune {verb} {files[-1].stem}: starting PyTorch and Lightning ...")
    from lt_offload.cli.run import run

    return run(verb, files, args[1:])


def _fail(message: str, *, debug: bool, code: int) -> int:
    if debug:
        traceback.print_exc()
    print(f"error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
