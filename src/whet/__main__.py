"""`python -m whet`."""

from whet.cli.main import main

if __name__ == "__main__":
    main()
