"""From a command line to the list of cells; knows the schema, not how a cell is run or judged."""
