"""From rows to verdicts, tables, figures and pages."""
