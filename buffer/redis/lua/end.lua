-- The run is over: everyone who waits finds out.
redis.call('HSET', meta_key, 'ended', 1)
for _ = 1, 16 do wake('admit') end
wake('take')
return 'OK'
