"""`train prove`: a calm run and one that is killed and stopped at chosen updates, compared bit by bit."""
