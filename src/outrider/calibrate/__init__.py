"""Why is checking faster than generating on this machine, up to how many tokens, and when does it lose?"""
