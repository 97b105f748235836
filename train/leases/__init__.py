"""Who holds which GPU, and who waits: locks in a folder that all users and stations of a machine share. No daemon."""
