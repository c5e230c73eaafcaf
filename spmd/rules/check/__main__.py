"""`python -m spmd.rules.check`: every rule proved by execution, with a table; `--help` tells more."""

try:
    from proofs.rule_check.command import main
except ModuleNotFoundError as error:
    raise SystemExit(
        f"The proof of the rules needs {error.name}. It runs in a clone of the repository, after `make setup`."
    ) from None

if __name__ == "__main__":
    raise SystemExit(main())
