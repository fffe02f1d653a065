"""`python -m mezo_cli`: the same doors as `mezo`."""

from mezo_cli.cli import main

if __name__ == "__main__":
    main()
