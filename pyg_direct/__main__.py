"""`python -m pyg_direct`, which is `pyg-direct`."""

from pyg_direct.cli.app import main

if __name__ == "__main__":
    main()
