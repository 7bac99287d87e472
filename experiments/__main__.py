from experiments.comparison import main


main()
