"""The package as it is built for others: the wheel and the sdist, installed and used outside of the clone."""
