"""Read files: which of a folder are whose, and what is in a table, a workbook, an image or a column of dates."""
