"""`python -m whet_train`: the command `whet`, wherever a package named whet may lie."""

from whet_train import main

if __name__ == "__main__":
    main()
