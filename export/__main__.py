"""`python -m vanilla_transformer_export` is the command `vanilla-transformer`."""

from .cli.main import main

if __name__ == "__main__":
    main()
