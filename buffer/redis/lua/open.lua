-- Attach to a run, new or old, and state the admission parameters. ARGV: field, value, ...
for i = 1, #ARGV, 2 do redis.call('HSET', meta_key, ARGV[i], ARGV[i + 1]) end
redis.call('HSETNX', meta_key, 'format', 1)
wake('admit')
wake('take')
return 'OK'
