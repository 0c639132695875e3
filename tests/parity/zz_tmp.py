import sys
from tests.parity.test_parity import *
if __name__=="__main__":
    exp = train_reference(initial_weights(RECIPE), RECIPE)
    for st in (1,2,3):
        try:
            c = run_ranks(train_layouts, 2, RECIPE, (1,1,2), [st], ["--deepspeed_config","/tmp/lead/off.json"])
            print(st, max(abs(c[0][st][s][0]/exp[s][0]-1) for s in range(20)))
        except Exception as e: print(st, str(e)[-1500:])
