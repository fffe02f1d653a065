"""The entry point of `mezo` and of `python -m mezo_cli`. Nothing is imported before Ctrl-C is handled."""

import sys  # built in, as nothing else may take time before `main`


def main() -> None:
    """Run the command line. Ctrl-C while it is imported, or a second one, ends in one line too."""
    lost: list[object] = []  # a Ctrl-C inside a callback of the import system: Python would print it and continue
    default = sys.unraisablehook

    def remember(unraisable: "sys.UnraisableHookArgs") -> None:
        (lost.append if unraisable.exc_type is KeyboardInterrupt else default)(unraisable)

    try:
        sys.unraisablehook = remember
        from mezo_cli.cli import main as run

        sys.unraisablehook = default
        if lost:
            raise KeyboardInterrupt
        run()
    except (KeyboardInterrupt, Exception) as error:
        from mezo_cli.errors import is_interruption

        if is_interruption(error):
            print("error: interrupted", file=sys.stderr)
            sys.exit(130)
        # A defect: its traceback, as Python prints it but for control characters.
        import traceback

        from mezo_cli.console import printable
        from mezo_cli.errors import without_credentials

        print(printable(without_credentials(traceback.format_exc())), end="", file=sys.stderr)
        sys.exit(1)
    finally:  # a Ctrl-C from here on ends the process without a traceback
        import signal

        exec("")  # resets CPython's mark of an interrupted `exec`, which would turn status 130 into death by SIGINT
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
