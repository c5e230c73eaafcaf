"""Questions about a plan: explanations of values, differences between plans, communication budgets and pins."""
