"""`python -m chronicle` is the command `chronicle`."""

from chronicle_ml import main

if __name__ == "__main__":
    main()
