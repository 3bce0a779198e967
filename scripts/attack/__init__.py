"""Programs of users' kind, drawn by seeds, each trained plainly and within budgets: do they give the same numbers?"""
