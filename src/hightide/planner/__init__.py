"""Decisions: a pure function from facts (ModelProfile) and limits to a Plan, and from a Plan to a Schedule. No
torch."""
