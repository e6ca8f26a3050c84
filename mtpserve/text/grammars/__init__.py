"""Constraints on an output's text, as masks over tokens: clients' grammars and schemas, on llguidance, and
thinking budgets."""
