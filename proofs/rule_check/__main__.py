"""`python -m proofs.rule_check` proves every rule by execution and prints a table; `--help` lists the options."""

try:
    from proofs.rule_check.command import main
except ModuleNotFoundError as error:
    raise SystemExit(
        f"The proof of the rules needs {error.name}. It runs in a clone of the repository, after `make setup`."
    ) from None

if __name__ == "__main__":
    raise SystemExit(main())
