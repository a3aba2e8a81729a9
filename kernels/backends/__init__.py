"""What runs a checked call. Modules in dependency order.

reference   any device, defines what is correct, written to be read
choose      which backend accepts a problem, and why the others do not
"""
